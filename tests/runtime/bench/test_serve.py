"""The load generator against a real server: what it sends, measures, counts and refuses."""

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

from skiff_runtime.bench.flag_types import Span
from skiff_runtime.bench.online.dataset import read_dataset
from skiff_runtime.bench.online.load_generator import Limits
from skiff_runtime.bench.online.results import Objective, distribution, summarize
from skiff_runtime.bench.online.runner import Plan, measure
from skiff_runtime.bench.workload import Sample, arrivals, random_tokens
from skiff_runtime.errors import ConfigError


@pytest.fixture
def server() -> Iterator[CannedServer]:
    with canned_server() as running:
        yield running


def plan(server: CannedServer, samples: list[Sample], **changes: Any) -> Plan:
    settings: dict[str, Any] = {
        "url": server.url,
        "model": "canned",
        "endpoint": "completions",
        "samples": samples,
        "arrivals": [0.0] * len(samples),
        "temperature": 0.0,
        "seed": 0,
        "ignore_eos": True,
        "limits": Limits(None, 30.0, 60.0),
    }
    return Plan(**{**settings, **changes})


def figures(of: Plan, objective: Objective | None = None) -> dict[str, Any]:
    load, seconds = measure(of, title="test")
    return summarize(load, seconds, objective or Objective())


def bench(*flags: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "skiff_runtime", "bench", "serve", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_command_measures_and_writes_every_figure(server: CannedServer, tmp_path: Path) -> None:
    server.token_seconds = 0.005
    output = tmp_path / "result.json"
    load = ["--num-prompts", "20", "--request-rate", "100", "--warmup", "2", "--seed", "3"]
    lengths = ["--input-len", "5:9", "--output-len", "2:4", "--slo-ttft-ms", "60000"]
    done = bench("--url", server.url, *load, *lengths, "--output", str(output))
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


def test_a_seed_repeats_prompts_lengths_and_arrivals() -> None:
    def draw() -> tuple[list[Sample], list[float]]:
        generator = np.random.default_rng(5)
        return random_tokens(9, Span(1, 40), Span(1, 40), 500, generator), arrivals(9, 10.0, generator)

    assert draw() == draw()


def test_arrivals_are_poisson() -> None:
    times = arrivals(20_000, 50.0, np.random.default_rng(0))
    gaps = np.diff(times)
    assert times[0] == 0.0
    assert abs(gaps.mean() - 0.02) < 0.001 and abs(gaps.std() - 0.02) < 0.001
    assert arrivals(3, math.inf, np.random.default_rng(0)) == [0.0, 0.0, 0.0]


def test_requests_leave_when_due_whatever_became_of_the_others(server: CannedServer) -> None:
    server.token_seconds = 0.2
    result = figures(plan(server, [Sample("x", 5)] * 10, arrivals=[0.01 * index for index in range(10)]))
    assert result["succeeded"] == result["peak_concurrency"] == 10


def test_concurrency_is_bounded_and_connections_are_reused(server: CannedServer) -> None:
    result = figures(plan(server, [Sample("x", 5)] * 30, limits=Limits(3, 30.0, 60.0)))
    assert result["succeeded"] == 30 and result["peak_concurrency"] == 3
    assert server.connections == 3


def test_failures_are_counted_by_kind(server: CannedServer) -> None:
    prompts = ["busy", "busy", "cut", "broken", "fine", "slow"]
    samples = [Sample(prompt, 4) for prompt in prompts]
    result = figures(plan(server, samples, limits=Limits(None, 2.0, 60.0)))
    assert result["succeeded"] == 1
    assert result["failures"] == {"connection lost": 1, "error event": 1, "http 429": 2, "timeout": 1}
    assert "wait already" in result["failure_examples"]["http 429"]
    assert result["failure_examples"]["error event"] == "the engine failed"
    assert server.hung_up.wait(10)  # the slow one was really cut off


def test_a_run_ends_when_its_time_is_over(server: CannedServer) -> None:
    samples = [Sample("slow", 4)] * 3
    result = figures(plan(server, samples, arrivals=[0.0, 0.0, 50.0], limits=Limits(None, 30.0, 1.0)))
    assert result["failures"] == {"cut off": 2, "not sent": 1}
    assert result["duration_seconds"] < 20


def test_nobody_listening_is_a_failure_of_each_request(server: CannedServer) -> None:
    result = figures(plan(server, [Sample("x", 1)] * 2, url="http://127.0.0.1:1"))
    assert result["failures"] == {"no connection": 2}


def test_chat_sends_conversations_from_a_dataset(server: CannedServer, tmp_path: Path) -> None:
    dataset = tmp_path / "questions.jsonl"
    dataset.write_text(
        '{"prompt": "a", "output_tokens": 2}\n\n{"messages": [{"role": "user", "content": "b"}]}\n'
    )
    generator = np.random.default_rng(0)
    samples = read_dataset(dataset, 4, Span(3, 3), chat=True, generator=generator)
    result = figures(plan(server, samples, endpoint="chat"))
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
def test_a_malformed_dataset_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    dataset = tmp_path / "d.jsonl"
    dataset.write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        read_dataset(dataset, 1, Span(1, 1), chat=False, generator=np.random.default_rng(0))


@pytest.mark.parametrize(
    "flags",
    [
        ("--num-prompts", "0"),
        ("--request-rate", "-1"),
        ("--input-len", "9:5"),
        ("--timeout-seconds", "nan"),
        ("--temperature", "hot"),
        ("--url", "ftp://host"),
    ],
)
def test_a_senseless_flag_is_named(flags: tuple[str, str]) -> None:
    done = bench("--model", "m", "--warmup", "0", *flags)
    assert done.returncode == 2
    assert flags[0] in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_server_that_refuses_is_noticed_before_the_load(server: CannedServer, tmp_path: Path) -> None:
    dataset = tmp_path / "busy.jsonl"
    dataset.write_text('{"prompt": "busy"}')
    done = bench("--url", server.url, "--dataset", str(dataset), "--num-prompts", "50")
    assert done.returncode == 2 and len(server.bodies) == 1
    assert "fails such a request (http 429)" in done.stderr and "wait already" in done.stderr


def test_reasoning_counts_as_tokens_that_came(server: CannedServer) -> None:
    sample = Sample([{"role": "user", "content": "think"}], 5)
    result = figures(plan(server, [sample], endpoint="chat"))
    assert result["succeeded"] == 1 and result["itl_ms"]["count"] == 5  # one piece of reasoning, five of text


def test_words_are_sent_where_token_ids_cannot_be(server: CannedServer) -> None:
    done = bench(
        "--url",
        server.url,
        "--endpoint",
        "chat",
        "--input-len",
        "7",
        "--num-prompts",
        "3",
        "--request-rate",
        "inf",
    )
    assert done.returncode == 0, done.stderr
    assert [len(body["messages"][0]["content"].split()) for body in server.bodies] == [7] * 4


def test_percentiles_are_those_of_the_sample() -> None:
    found = distribution(list(range(101)))
    assert found == {"count": 101, "mean": 50.0, "p50": 50.0, "p90": 90.0, "p99": 99.0, "max": 100.0}
    assert distribution([]) is None
