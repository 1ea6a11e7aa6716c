"""Sweeps over request rates: traces, shared prefixes, ShareGPT conversations, goodput, plot and comparison."""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from canned_server import CannedServer, canned_server

from skiff_runtime.bench.flag_types import LengthRange
from skiff_runtime.bench.online import serve
from skiff_runtime.bench.online.arrival_trace import Arrival, read_trace, scale_to_rate
from skiff_runtime.bench.online.dataset import read_dataset
from skiff_runtime.bench.online.load_generator import LoadGenerator, LoadLimits
from skiff_runtime.bench.online.results import LatencyObjective, summarize_load
from skiff_runtime.bench.online.runner import LoadPlan, run_load
from skiff_runtime.bench.workload import (
    PrefixGroups,
    SampleRequest,
    draw_block_tokens,
    draw_shared_prefix_chats,
    draw_shared_prefix_tokens,
)
from skiff_runtime.errors import ConfigError

SHAREGPT = [
    {
        "conversations": [
            {"from": "system", "value": "S"},
            {"from": "human", "value": "Q"},
            {"from": "gpt", "value": "A" * 40},
        ]
    },
    {"conversations": [{"from": "gpt", "value": "an answer to nothing"}]},
    {"conversations": []},
]


@pytest.fixture
def server() -> Iterator[CannedServer]:
    with canned_server() as running:
        yield running


def bench(*flags: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "skiff_runtime", "bench", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("name", "unit", "text"),
    [
        ("a.jsonl", "ms", '{"timestamp": 3000, "input_length": 7, "output_length": 2, "hash_ids": []}\n'
                          '{"timestamp": 1000, "input_length": 5, "output_length": 3}\n'),
        ("b.csv", "s", "Timestamp,Model,Request tokens,Response tokens\n1,m,5,3\n2,m,9,0\n3,m,7,2\n"),
        ("c.csv", "s", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,5,3\n"
                       "2023-11-16 18:15:48.6805900,7,2\n"),
    ],
)  # fmt: skip
def test_traces_are_read_under_the_column_names_of_published_ones(
    tmp_path: Path, name: str, unit: str, text: str
) -> None:
    file = tmp_path / name
    file.write_text(text)
    assert read_trace(file, unit) == [Arrival(0.0, 5, 3), Arrival(2.0, 7, 2)]


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("a.jsonl", "", "holds no request"),
        ("a.jsonl", "{", "line 1"),
        ("a.jsonl", '{"timestamp": 1, "input_length": 5}', "line 1: 'output_length' is missing"),
        (
            "a.jsonl",
            '{"timestamp": 1, "input_length": 5.5, "output_length": 1}',
            "input_length must be a whole",
        ),
        ("a.jsonl", '{"timestamp": "soon", "input_length": 5, "output_length": 1}', "timestamp must be"),
        (
            "a.jsonl",
            '{"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": [1, "2"]}',
            r"line 1: hash_ids must be a list of whole numbers: .*\$\[1\]",
        ),
        ("a.csv", "timestamp,input_length,output_length\n1,0,1\n", "line 2: input_length"),
        ("a.csv", "timestamp,input_length,output_length\nnan,1,1\n", "timestamp must be"),
    ],
)
def test_malformed_line_of_a_trace_is_named(tmp_path: Path, name: str, text: str, complaint: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        read_trace(tmp_path / name, "s")


def test_scaling_a_trace_keeps_its_pattern_of_arrivals() -> None:
    assert scale_to_rate([0.0, 1.0, 1.0, 6.0], 2.0) == [0.0, 0.25, 0.25, 1.5]
    assert scale_to_rate([0.0, 1.0], float("inf")) == [0.0, 0.0]
    assert scale_to_rate([0.0], 2.0) == [0.0]


def test_prompts_share_a_prefix_within_their_group_only() -> None:
    shape = PrefixGroups(groups=3, per_group=4, tokens=20)
    samples = draw_shared_prefix_tokens(
        shape, LengthRange(5, 9), LengthRange(2, 2), 1000, np.random.default_rng(0)
    )
    prompts = [each.prompt for each in samples]
    heads = [tuple(prompt[:20]) for prompt in prompts]
    assert sorted(heads.count(head) for head in set(heads)) == [4, 4, 4]
    assert len({tuple(map(str, prompt)) for prompt in prompts}) == 12
    assert all(25 <= len(prompt) <= 29 for prompt in prompts)
    texts = draw_shared_prefix_chats(shape, LengthRange(5, 5), LengthRange(2, 2), np.random.default_rng(0))
    assert len({each.prompt[0]["content"] for each in texts}) == 3  # type: ignore[index]


def test_sharegpt_gives_first_questions_and_the_lengths_of_their_answers(tmp_path: Path) -> None:
    file = tmp_path / "sharegpt.json"
    file.write_text(json.dumps(SHAREGPT))
    generator = np.random.default_rng(0)
    [chat] = read_dataset(file, 1, None, is_sharegpt=True, is_chat=True, generator=generator)
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}]
    assert chat == SampleRequest(messages, 10)
    plain = read_dataset(file, 1, LengthRange(3, 3), is_sharegpt=True, is_chat=False, generator=generator)
    assert plain == [SampleRequest("Q", 3)]
    file.write_text('[{"conversations": 5}]')
    with pytest.raises(ConfigError, match="ShareGPT"):
        read_dataset(file, 1, None, is_sharegpt=True, is_chat=True, generator=generator)


@pytest.mark.parametrize(
    ("objective", "met"),
    [
        (LatencyObjective(), 4),
        (LatencyObjective(ttft_ms=60_000, tpot_ms=60_000), 4),
        (LatencyObjective(ttft_ms=0.001), 0),
        (LatencyObjective(tpot_ms=1.0), 1),  # an output of one token has no TPOT
    ],
)
def test_goodput_counts_requests_that_meet_the_whole_objective(
    server: CannedServer, objective: LatencyObjective, met: int
) -> None:
    server.token_seconds = 0.02
    samples = [SampleRequest("x", count) for count in (3, 3, 3, 1)] + [SampleRequest("busy", 1)]
    plan = LoadPlan(
        url=server.url,
        model="canned",
        backend="openai",
        samples=samples,
        arrivals=[0.0] * 5,
        temperature=0,
        seed=0,
        ignore_eos=True,
        limits=LoadLimits(None, 30.0, 60.0),
    )
    figures = summarize_load(*run_load(plan, title="test"), objective)
    assert (figures["slo_met"], figures["slo_met_share"]) == (met, met / 5)
    assert figures["goodput_requests_per_second"] == met / figures["duration_seconds"]


@dataclass(frozen=True)
class Sweep:
    """Results of a sweep: its directory, written figures, standard output, and the bodies of all requests."""

    directory: Path
    figures: dict[str, Any]
    output: str
    bodies: list[dict[str, Any]]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    """Run a sweep over two rates with a plot."""
    folder = tmp_path_factory.mktemp("sweep")
    flags = [
        "--request-rate",
        "50,100",
        "--num-prompts",
        "10",
        "--goodput",
        "tpot:5000",
        "--api-key",
        "secret-7",
    ]
    files = ["--output-json", str(folder / "a.json"), "--plot", str(folder / "a.png")]
    with canned_server() as server:
        done = bench(
            "serve", "--base-url", server.url, "--input-len", "4", "--output-len", "3", *flags, *files
        )
        assert done.returncode == 0, done.stderr
        assert set(server.authorizations) == {"Bearer secret-7"}
        return Sweep(folder, json.loads((folder / "a.json").read_bytes()), done.stdout, server.bodies)


def test_each_rate_of_a_sweep_has_its_own_prompts(sweep: Sweep) -> None:
    assert [run["request_rate"] for run in sweep.figures["runs"]] == ["50", "100"]
    assert [run["succeeded"] for run in sweep.figures["runs"]] == [10, 10]
    assert sweep.figures["options"]["request_rate"] == "50,100"
    prompts = {tuple(body["prompt"]) for body in sweep.bodies}
    assert len(prompts) == len(sweep.bodies) == 22  # each rate has a warm-up
    assert "ITL p50" in sweep.output
    assert "10 of 10, within TPOT 5000 ms" in " ".join(sweep.output.split())
    assert "secret-7" not in (sweep.directory / "a.json").read_text()


def test_sweep_is_plotted(sweep: Sweep) -> None:
    picture = (sweep.directory / "a.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000


def test_results_are_compared_rate_by_rate(sweep: Sweep) -> None:
    folder, result = sweep.directory, deepcopy(sweep.figures)
    result["runs"] = [result["runs"][1]]
    result["runs"][0]["ttft_ms"]["p50"] *= 2
    result["options"]["seed"] = 5
    (folder / "b.json").write_text(json.dumps(result))
    done = bench(
        "compare", str(folder / "a.json"), str(folder / "b.json"), "--output-json", str(folder / "c.json")
    )
    assert done.returncode == 0, done.stderr
    assert "at 100 requests per second" in done.stdout and "at 50" not in done.stdout
    assert "seed differs: 0 and 5" in done.stdout
    rows = json.loads((folder / "c.json").read_bytes())["rates"]["100"]
    assert rows["TTFT p50, ms"]["ratio"] == pytest.approx(2.0) and rows["requests/s"]["ratio"] == 1.0


def test_file_that_is_no_result_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"benchmark": "offline"}')
    done = bench("compare", str(tmp_path / "x.json"), str(tmp_path / "x.json"))
    assert done.returncode == 2 and "x.json is no result of" in done.stderr


def test_trace_keeps_its_lengths_and_arrival_times(server: CannedServer, tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("timestamp,input_length,output_length\n5,3,2\n5.3,6,4\n5.3,9,1\n")
    done = bench(
        "serve",
        "--base-url",
        server.url,
        "--dataset-name",
        "trace",
        "--dataset-path",
        str(trace),
        "--num-warmups",
        "0",
        "--output-json",
        str(tmp_path / "r"),
    )
    assert done.returncode == 0, done.stderr
    lengths = [(len(body["prompt"]), body["max_tokens"]) for body in server.bodies]
    assert lengths[0] == (3, 2)
    assert sorted(lengths[1:]) == [(6, 4), (9, 1)]  # these two are sent at the same moment
    [run] = json.loads((tmp_path / "r").read_bytes())["runs"]
    assert run["request_rate"] == "recorded" and run["duration_seconds"] >= 0.3


def test_made_chats_are_a_trace_whose_prompts_continue_each_other(tmp_path: Path) -> None:
    script, path = Path(__file__).parents[2] / "peers/make_chat_trace.py", tmp_path / "chat.jsonl"
    subprocess.run([sys.executable, script, path, "--requests", "200"], check=True, timeout=60)
    arrivals = read_trace(path, "s")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(arrivals) == len(lines) == 200
    prompts = draw_block_tokens(
        [(each.input_tokens, each.block_ids) for each in arrivals], 16, 1000, np.random.default_rng(0)
    )
    assert [len(each) for each in prompts] == [each.input_tokens for each in arrivals]
    continued = [each for each in lines if each["parent_chat_id"] >= 0 and each["input_length"] < 12_000]
    assert len(continued) > 40
    for each in continued:
        parent, shared = each["parent_chat_id"], lines[each["parent_chat_id"]]["input_length"] // 16 * 16
        assert prompts[each["chat_id"]][:shared] == prompts[parent][:shared]
        assert prompts[each["chat_id"]][: shared + 16] != prompts[parent][: shared + 16]


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_prompts_of_a_trace_have_the_blocks_in_common_that_its_hash_ids_have(
    server: CannedServer, tmp_path: Path, backend: str
) -> None:
    lines = [(0, 9, [7, 8, 2]), (0.1, 10, [7, 8]), (0.2, 12, [7, 9, 2])]
    trace = tmp_path / "t.jsonl"
    trace.write_text(
        "\n".join(
            json.dumps({"timestamp": at, "input_length": length, "output_length": 1, "hash_ids": ids})
            for at, length, ids in lines
        )
    )
    flags = ("serve", "--base-url", server.url, "--backend", backend, "--dataset-name", "trace")
    done = bench(
        *(*flags, "--dataset-path", str(trace), "--trace-block-size", "4", "--request-rate", "20,40"),
        *("--num-warmups", "0"),
    )
    assert done.returncode == 0, done.stderr
    prompts = [
        body["prompt"] if backend == "openai" else body["messages"][0]["content"].split()
        for body in server.bodies
    ]
    first, second, third = prompts[:3]
    assert [len(each) for each in (first, second, third)] == [9, 10, 12]
    assert second[:8] == first[:8] and third[:4] == first[:4] and third[8] == first[8]
    assert third[4:8] != first[4:8] and prompts[3][:4] != first[:4], "runs have prompts of their own"
    refused = bench(*flags, "--model", "m", "--dataset-path", str(trace))
    assert refused.returncode == 2 and "give the trace's --trace-block-size" in refused.stderr


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--dataset-name", "custom"), "custom needs --dataset-path"),
        (("--dataset-path", "d"), "--dataset-path needs --dataset-name sharegpt, custom or trace"),
        (("--dataset-name", "trace", "--dataset-path", "t", "--input-len", "5"), "leave out --input-len"),
        (("--dataset-name", "generated-shared-prefix", "--num-prompts", "5"), "leave out --num-prompts"),
        (("--trace", "t"), "--trace is now --dataset-name trace --dataset-path FILE"),
        (("--goodput", "ttft:5", "ttft:6"), "--goodput names a metric twice"),
        (("--request-rate", "1,1"), "names a rate twice"),
        (("--request-rate", "1,zero"), "--request-rate"),
        (("--request-rate", "inf", "--plot", "p.png"), "--plot draws"),
    ],
)
def test_contradictory_flags_are_named(flags: tuple[str, ...], complaint: str) -> None:
    done = bench("serve", "--model", "m", *flags)
    assert done.returncode == 2 and complaint in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("rates", ["100,200", "inf"])
def test_two_servers_get_the_same_requests_in_alternating_order(rates: str, tmp_path: Path) -> None:
    with canned_server() as one, canned_server() as other:
        one.token_seconds, other.token_seconds = 0.002, 0.2
        output, picture = tmp_path / "both.json", tmp_path / "both.svg"
        flags = [
            "--compare",
            other.url,
            "--compare-rounds",
            "2",
            "--request-rate",
            rates,
            "--num-prompts",
            "4",
        ]
        flags += [
            "--num-warmups",
            "0",
            "--input-len",
            "3",
            "--output-len",
            "5",
            "--compare-api-key",
            "sk-secret",
        ]
        done = bench(
            "serve", "--base-url", one.url, *flags, "--output-json", str(output), "--plot", str(picture)
        )
        assert done.returncode == 0, done.stderr
        sent = [sorted(server.bodies, key=lambda body: list(body["prompt"])) for server in (one, other)]
        assert sent[0] == sent[1]
        prompts = [tuple(body["prompt"]) for body in one.bodies]
        assert len(set(prompts)) == len(prompts) == 8 * len(rates.split(","))  # of each round, its own
    written = json.loads(output.read_bytes())
    assert written["benchmark"] == "serve-comparison" and "sk-secret" not in output.read_text()
    for rate in written["rates"]:
        assert [figures["succeeded"] for figures in (*rate["a"], *rate["b"])] == [4] * 4
        latency = rate["summary"]["ITL p50, ms"]
        assert latency["ratio_min"] <= latency["ratio"] <= latency["ratio_max"]
        # The second server pauses 200 ms, the first one 2.
        assert latency["b"] > 15.0 and latency["ratio"] > 1.0
    assert "B/A" in done.stdout and "range of the rounds" in done.stdout
    drawn = picture.read_text()
    assert drawn.count("<svg") == 1 and one.url in done.stdout and other.url in done.stdout


def test_servers_take_turns_in_being_the_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with canned_server() as one, canned_server() as other:
        parser = argparse.ArgumentParser()
        serve.add_arguments(parser)
        arguments = parser.parse_args(
            [
                "--base-url",
                one.url,
                "--compare",
                other.url,
                "--compare-rounds",
                "4",
                "--request-rate",
                "inf",
                "--num-prompts",
                "1",
                "--num-warmups",
                "0",
                "--plot",
                str(tmp_path / "both.png"),
            ]
        )
        urls: list[str] = []

        def record(plan: LoadPlan, *, title: str) -> tuple[LoadGenerator, float]:
            urls.append(plan.url)
            return run_load(plan, title=title)

        monkeypatch.setattr(serve, "run_load", record)
        assert serve.run(arguments) == 0
        assert urls == [one.url, other.url, other.url, one.url] * 2
