"""The benchmarks and the chat with a whole real service beneath them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tiny_models import make_model

from skiff_runtime.bench.cost import Sampled, costs
from skiff_runtime.bench.cpu_time import service_processes
from skiff_runtime.errors import StartupError
from skiff_runtime.processes.local_server import LocalServer

SMALL = ["--max-total-tokens", "4096", "--cpu-threads", "1"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[LocalServer]:
    with LocalServer(["--model", str(model), *SMALL]) as running:
        yield running


def skiff(*words: str, stdin: str = "") -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "skiff_runtime", *words],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=240,
    )


def figures(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_bytes())
    return found


def test_chat_gets_the_same_answer_to_the_same_seed(server: LocalServer) -> None:
    flags = ["chat", "--url", server.url, "--seed", "5", "--max-tokens", "8"]
    done = skiff(*flags, stdin="hello\n/reset\nhello\n")
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.split("Started a new conversation.\n")
    assert first == second and first.strip()


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_serve_measures_real_answers(server: LocalServer, tmp_path: Path, endpoint: str) -> None:
    output = tmp_path / "serve.json"
    load = ["--num-prompts", "16", "--request-rate", "100", "--input-len", "4:20", "--output-len", "2:9"]
    done = skiff(
        "bench",
        "serve",
        "--url",
        server.url,
        "--endpoint",
        endpoint,
        "--vocabulary",
        "200",
        *load,
        "--output",
        str(output),
    )
    assert done.returncode == 0, done.stderr
    (result,) = figures(output)["runs"]
    assert result["succeeded"] == 16 and result["failures"] == {}
    assert 16 * 2 <= result["output_tokens"] <= 16 * 9


def test_overhead_sums_over_the_real_processes(server: LocalServer, tmp_path: Path) -> None:
    output = tmp_path / "overhead.json"
    load = ["--num-prompts", "40", "--concurrency", "8", "--input-len", "8", "--output-len", "12"]
    done = skiff(
        "bench", "overhead", "--url", server.url, "--pid", str(server.pid), *load, "--output", str(output)
    )
    assert done.returncode == 0, done.stderr
    result = figures(output)
    assert sorted(result["processes"]) == ["api", "detokenizer", "rank0", "supervisor", "tokenizer0"]
    assert result["output_tokens"] == 40 * 1 + 40 * 12
    assert result["processes"]["rank0"]["us_per_token"] > 0
    assert result["fronts"]["busy_ratio"] > 0
    assert "api + tokenizers + detokenizer" in done.stdout


def test_overhead_refuses_a_process_that_is_no_service(server: LocalServer) -> None:
    done = skiff("bench", "overhead", "--url", server.url, "--pid", str(os.getpid()))
    assert done.returncode == 2 and "process id of `skiff serve`" in done.stderr
    done = skiff("bench", "overhead", "--url", server.url)
    assert done.returncode == 2 and "--pid belong together" in done.stderr


def test_offline_runs_its_rounds_to_full_length(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "offline.json"
    load = ["--num-requests", "8", "--input-len", "4:20", "--output-len", "3:9", "--rounds", "2"]
    done = skiff("bench", "offline", "--model", str(model), *SMALL, *load, "--output", str(output))
    assert done.returncode == 0, done.stderr
    first, second = figures(output)["rounds"]
    assert first["prompt_tokens"] != second["prompt_tokens"]  # new prompts each round
    assert all(8 * 3 <= each["output_tokens"] <= 8 * 9 for each in (first, second))
    assert figures(output)["output_tokens_per_second"] == pytest.approx(second["output_tokens_per_second"])
    kinds = second["steps"]["kinds"]
    assert (
        sum(kind["tokens"] for kind in kinds.values())
        == second["prompt_tokens"] + second["output_tokens"] - 8
    )
    assert 0 < sum(kind["seconds"] for kind in kinds.values()) <= second["seconds"] * 1.01
    assert 0 < figures(output)["roofline_ratio"] < 1.5
    assert "of the roofline" in done.stdout


def test_offline_counts_shared_prefixes_and_profiles_steps(tmp_path: Path) -> None:
    output, trace = tmp_path / "offline.json", tmp_path / "trace.json.gz"
    shared = ["--workload", "shared-prefix", "--prefix-groups", "2", "--prompts-per-group", "3"]
    load = [*shared, "--prefix-len", "64", "--input-len", "8", "--output-len", "100", "--rounds", "1"]
    result = ["--output", str(output), "--profile", str(trace), "--profile-steps", "4", "--no-roofline"]
    done = skiff("bench", "offline", "--model", "demo://", *SMALL, *load, *result)
    assert done.returncode == 0, done.stderr
    [only] = figures(output)["rounds"]
    assert only["prompt_tokens"] == 6 * 72 and only["prefix_hit_tokens"] == 4 * 64
    assert only["prefill_tokens"] == 6 * 72 - 4 * 64
    assert figures(output)["roofline_ratio"] is None and only["roofline"] is None
    parts = figures(output)["profile"]["parts"]
    assert parts["attention"] > 0 and parts["matrix work"] > 0 and parts["idle"] >= 0
    assert trace.stat().st_size > 1000 and "matrix work" in done.stdout


def test_offline_says_when_there_was_nothing_to_profile(model: Path, tmp_path: Path) -> None:
    load = ["--num-requests", "1", "--input-len", "4", "--output-len", "1", "--rounds", "1", "--no-roofline"]
    trace = str(tmp_path / "trace.json")
    done = skiff("bench", "offline", "--model", str(model), *SMALL, *load, "--profile", trace)
    assert done.returncode != 0 and "over before a step could be profiled" in done.stderr


def test_offline_refuses_lengths_that_cannot_fit(model: Path) -> None:
    done = skiff("bench", "offline", "--model", str(model), "--input-len", "400", "--output-len", "200")
    assert done.returncode == 2 and "--input-len 400 and --output-len 200 together exceed 512" in done.stderr


def test_gaps_are_those_of_the_steps_beside_a_long_prompt(tmp_path: Path) -> None:
    output = tmp_path / "gaps.json"
    load = ["--streams", "4", "--context", "20", "--prompt-len", "400", "--quiet-steps", "8"]
    flags = [*load, "--chunks", "all,128,64", "--max-num-batched-tokens", "204", "--max-total-tokens", "4096"]
    done = skiff("bench", "gaps", *flags, "--cpu-threads", "1", "--output", str(output))
    assert done.returncode == 0, done.stderr
    runs = figures(output)["runs"]
    assert [each["mixed_prefill_tokens"] for each in runs] == [None, 128, 64]
    for each, steps in zip(runs, (2, 4, 7), strict=True):
        # A step that was in flight when the prompt came gave each stream a token, too.
        assert each["steps"] in (steps, steps + 1)
        assert each["quiet_ms"] > 0 and each["median_ms"] <= each["largest_ms"] <= each["first_token_ms"]
        assert each["ratio"] == pytest.approx(each["largest_ms"] / each["quiet_ms"])
    assert "largest ms" in done.stdout


def test_gaps_refuses_what_does_not_fit() -> None:
    done = skiff("bench", "gaps", "--prompt-len", "3000")
    assert done.returncode == 2 and "exceed --max-model-len (2048)" in done.stderr


def test_structured_measures_every_way_of_filling_masks(tmp_path: Path) -> None:
    """The command itself refuses masks that differ between the ways."""
    output = tmp_path / "structured.json"
    flags = ["--rows", "1,6", "--threads", "1,2", "--vocab-size", "4096", "--steps", "9"]
    done = skiff("bench", "structured", *flags, "--output", str(output))
    assert done.returncode == 0, done.stderr
    found = figures(output)
    assert found["vocabulary"] == 4096
    assert [(each["schema"], each["rows"], each["threads"]) for each in found["runs"]] == [
        (schema, rows, threads)
        for schema in ("free strings", "maxLength 40")
        for rows in (1, 6)
        for threads in (0, 1, 2)
    ]
    assert all(0 < each["median_ms"] <= each["p99_ms"] and each["steps"] == 9 for each in found["runs"])
    assert "row by row" in done.stdout and "p99 ms" in done.stdout
    for flag, value in (("--rows", "0"), ("--vocab-size", "511")):
        refused = skiff("bench", "structured", flag, value)
        assert refused.returncode == 2 and flag in refused.stderr


def test_cpu_time_is_that_which_the_system_counts(server: LocalServer) -> None:
    for each in service_processes(server.pid):
        ticks = each.handle.cpu_times()
        assert each.cpu_seconds() == pytest.approx(ticks.user + ticks.system, abs=0.25)


def test_costs_are_the_difference_of_two_loads() -> None:
    short = Sampled(1.0, 10, 10, {"api": 0.011})
    long = Sampled(3.0, 10, 110, {"api": 0.021})
    cost = costs(short, long)["api"]
    assert cost.us_per_token == pytest.approx(100.0)
    assert cost.us_per_request == pytest.approx(1000.0)
    assert cost.busy_ratio == pytest.approx(0.008)


def test_a_local_server_tells_why_it_did_not_start() -> None:
    with pytest.raises(StartupError, match="/no/such/model"), LocalServer(["--model", "/no/such/model"]):
        pass


def test_a_local_server_ends_with_its_parent(model: Path) -> None:
    script = (
        "import sys, time\n"
        "from skiff_runtime.processes.local_server import LocalServer\n"
        f"with LocalServer(['--model', {str(model)!r}, *{SMALL}]) as server:\n"
        "    print(server.pid, flush=True)\n"
        "    time.sleep(120)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    server = psutil.Process(int(parent.stdout.readline()))
    children = server.children(recursive=True)
    assert len(children) >= 4
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 60
    while any(_lives(each) for each in [server, *children]):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
