"""``skiff bench serve`` against a server with canned responses: requests, figures, failures and refused flags."""

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from canned_server import CannedServer, canned_server

from skiff_runtime.bench.flag_types import LengthRange
from skiff_runtime.bench.online.dataset import read_dataset
from skiff_runtime.bench.online.load_generator import LoadLimits
from skiff_runtime.bench.online.results import LatencyObjective, summarize_load
from skiff_runtime.bench.online.runner import LoadPlan, run_load
from skiff_runtime.bench.report import summarize_latencies
from skiff_runtime.bench.workload import SampleRequest, draw_arrivals, draw_token_prompts
from skiff_runtime.errors import ConfigError


@pytest.fixture
def server() -> Iterator[CannedServer]:
    with canned_server() as running:
        yield running


def plan(server: CannedServer, samples: list[SampleRequest], **changes: Any) -> LoadPlan:
    settings: dict[str, Any] = {
        "url": server.url,
        "model": "canned",
        "backend": "openai",
        "samples": samples,
        "arrivals": [0.0] * len(samples),
        "temperature": 0.0,
        "seed": 0,
        "ignore_eos": True,
        "limits": LoadLimits(None, 30.0, 60.0),
    }
    return LoadPlan(**{**settings, **changes})


def figures(of: LoadPlan, objective: LatencyObjective | None = None) -> dict[str, Any]:
    load, seconds = run_load(of, title="test")
    return summarize_load(load, seconds, objective or LatencyObjective())


def bench(*flags: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "skiff_runtime", "bench", "serve", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_command_writes_all_figures(server: CannedServer, tmp_path: Path) -> None:
    server.token_seconds = 0.005
    output = tmp_path / "result.json"
    load = ["--num-prompts", "20", "--request-rate", "100", "--num-warmups", "2", "--seed", "3"]
    lengths = ["--input-len", "5:9", "--output-len", "2:4", "--goodput", "ttft:60000"]
    done = bench("--base-url", server.url, *load, *lengths, "--output-json", str(output))
    assert done.returncode == 0, done.stderr
    written = json.loads(output.read_bytes())
    [result] = written["runs"]
    assert (result["requests"], result["succeeded"], result["failures"]) == (20, 20, {})
    measured = server.bodies[2:]
    assert all(5 <= len(body["prompt"]) <= 9 and 2 <= body["max_tokens"] <= 4 for body in server.bodies)
    assert all(body["ignore_eos"] and body["stream_options"] == {"include_usage": True} for body in measured)
    assert result["output_tokens"] == sum(body["max_tokens"] for body in measured)
    assert result["prompt_tokens"] == sum(len(body["prompt"]) for body in measured)
    assert result["itl_ms"]["count"] == sum(body["max_tokens"] - 1 for body in measured)
    assert result["itl_ms"]["mean"] > 2.0  # the server pauses 5 ms before each
    assert result["e2e_ms"]["mean"] > result["ttft_ms"]["mean"] + 5.0 > 5.0
    assert result["goodput_requests_per_second"] == result["requests_per_second"] > 0
    assert result["slo_met_share"] == 1.0 and result["request_rate"] == "100"
    assert written["options"]["input_len"] == "5:9" and written["options"]["model"] == "canned"
    assert "20 of 20 succeeded" in done.stdout and "time to first token" in done.stdout


def test_seed_determines_prompts_lengths_and_arrivals() -> None:
    def draw() -> tuple[list[SampleRequest], list[float]]:
        generator = np.random.default_rng(5)
        return draw_token_prompts(9, LengthRange(1, 40), LengthRange(1, 40), 500, generator), draw_arrivals(
            9, 10.0, generator
        )

    assert draw() == draw()


def test_arrivals_are_a_poisson_process() -> None:
    times = draw_arrivals(20_000, 50.0, np.random.default_rng(0))
    gaps = np.diff(times)
    assert times[0] == 0.0
    assert abs(gaps.mean() - 0.02) < 0.001 and abs(gaps.std() - 0.02) < 0.001
    assert draw_arrivals(3, math.inf, np.random.default_rng(0)) == [0.0, 0.0, 0.0]


def test_load_is_open_loop(server: CannedServer) -> None:
    server.token_seconds = 0.2
    result = figures(
        plan(server, [SampleRequest("x", 5)] * 10, arrivals=[0.01 * index for index in range(10)])
    )
    assert result["succeeded"] == result["peak_concurrency"] == 10


def test_max_concurrency_is_kept_and_connections_are_reused(server: CannedServer) -> None:
    result = figures(plan(server, [SampleRequest("x", 5)] * 30, limits=LoadLimits(3, 30.0, 60.0)))
    assert result["succeeded"] == 30 and result["peak_concurrency"] == 3
    assert server.connections == 3


def test_failures_are_counted_by_kind(server: CannedServer) -> None:
    prompts = ["busy", "busy", "cut", "broken", "fine", "slow"]
    samples = [SampleRequest(prompt, 4) for prompt in prompts]
    result = figures(plan(server, samples, limits=LoadLimits(None, 2.0, 60.0)))
    assert result["succeeded"] == 1
    assert result["failures"] == {"connection lost": 1, "error event": 1, "http 429": 2, "timeout": 1}
    assert "wait already" in result["failure_examples"]["http 429"]
    assert result["failure_examples"]["error event"] == "the engine failed"
    assert server.hung_up.wait(10)  # the slow request's connection was closed


def test_run_ends_at_its_time_limit(server: CannedServer) -> None:
    samples = [SampleRequest("slow", 4)] * 3
    result = figures(plan(server, samples, arrivals=[0.0, 0.0, 50.0], limits=LoadLimits(None, 30.0, 1.0)))
    assert result["failures"] == {"cut off": 2, "not sent": 1}
    assert result["duration_seconds"] < 20


def test_refused_connections_are_failures_of_requests(server: CannedServer) -> None:
    result = figures(plan(server, [SampleRequest("x", 1)] * 2, url="http://127.0.0.1:1"))
    assert result["failures"] == {"no connection": 2}


def test_chat_backend_sends_conversations_of_a_custom_dataset(server: CannedServer, tmp_path: Path) -> None:
    dataset = tmp_path / "questions.jsonl"
    dataset.write_text(
        '{"prompt": "a", "output_tokens": 2}\n\n{"messages": [{"role": "user", "content": "b"}]}\n'
    )
    generator = np.random.default_rng(0)
    samples = read_dataset(
        dataset, 4, LengthRange(3, 3), is_sharegpt=False, is_chat=True, generator=generator
    )
    result = figures(plan(server, samples, backend="openai-chat"))
    assert result["succeeded"] == 4 and result["output_tokens"] == 2 * (2 + 3)
    assert sorted(body["messages"][0]["content"] for body in server.bodies) == ["a", "a", "b", "b"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "is empty"),
        ("{not json}", "line 1"),
        ('{"prompt": "a"}\n{"messages": []}', "line 2: prompt is needed"),
        ('{"prompt": "a", "output_tokens": 0}', "at least 1"),
    ],
)
def test_malformed_dataset_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    dataset = tmp_path / "d.jsonl"
    dataset.write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        read_dataset(
            dataset,
            1,
            LengthRange(1, 1),
            is_sharegpt=False,
            is_chat=False,
            generator=np.random.default_rng(0),
        )


@pytest.mark.parametrize(
    "flags",
    [
        ("--num-prompts", "0"),
        ("--request-rate", "-1"),
        ("--input-len", "9:5"),
        ("--timeout-seconds", "nan"),
        ("--temperature", "hot"),
        ("--base-url", "ftp://host"),
        ("--goodput", "p99:5"),
        ("--goodput", "ttft:0"),
        ("--url", "http://x"),
        ("--slo-itl-ms", "50"),
    ],
)
def test_invalid_flag_is_named(flags: tuple[str, str]) -> None:
    done = bench("--model", "m", "--num-warmups", "0", *flags)
    assert done.returncode == 2
    assert flags[0] in done.stderr and len(done.stderr.splitlines()) == 1


def test_server_that_refuses_the_warm_up_gets_no_load(server: CannedServer, tmp_path: Path) -> None:
    dataset = tmp_path / "busy.jsonl"
    dataset.write_text('{"prompt": "busy"}')
    done = bench(
        "--base-url",
        server.url,
        "--dataset-name",
        "custom",
        "--dataset-path",
        str(dataset),
        "--num-prompts",
        "50",
    )
    assert done.returncode == 2 and len(server.bodies) == 1
    assert "the warm-up request failed (http 429)" in done.stderr and "wait already" in done.stderr


def test_reasoning_counts_as_output(server: CannedServer) -> None:
    sample = SampleRequest([{"role": "user", "content": "think"}], 5)
    result = figures(plan(server, [sample], backend="openai-chat"))
    assert result["succeeded"] == 1 and result["itl_ms"]["count"] == 5  # one event of reasoning, five of text


def test_chat_backend_sends_words_instead_of_token_ids(server: CannedServer) -> None:
    done = bench(
        "--base-url",
        server.url,
        "--backend",
        "openai-chat",
        "--input-len",
        "7",
        "--num-prompts",
        "3",
        "--request-rate",
        "inf",
    )
    assert done.returncode == 0, done.stderr
    assert [len(body["messages"][0]["content"].split()) for body in server.bodies] == [7] * 4


def test_latencies_are_summarized_by_percentiles() -> None:
    found = summarize_latencies(list(range(101)))
    assert found == {"count": 101, "mean": 50.0, "p50": 50.0, "p90": 90.0, "p99": 99.0, "max": 100.0}
    assert summarize_latencies([]) is None
