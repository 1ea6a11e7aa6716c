"""The benchmarks and the chat over a real service, on a tiny model."""

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

from skiff_runtime import log
from skiff_runtime.__main__ import main
from skiff_runtime.bench.cpu_time import find_service_processes
from skiff_runtime.bench.online.overhead import LoadCost, compute_costs
from skiff_runtime.errors import StartupError
from skiff_runtime.processes.local_server import LocalServer

pytestmark = pytest.mark.integration

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


def refuse(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the error of a command that refuses its flags, in this process, which has imported all that it needs."""
    monkeypatch.setattr(log, "configure", lambda *_: None)
    capsys.readouterr()
    assert main(list(words)) == 2
    return capsys.readouterr().err


def figures(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_bytes())
    return found


def test_chat_repeats_its_answer_with_the_same_seed(server: LocalServer) -> None:
    flags = ["chat", "--url", server.url, "--seed", "5", "--max-tokens", "8"]
    done = skiff(*flags, stdin="hello\n/reset\nhello\n")
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.split("Started a new conversation.\n")
    assert first == second and first.strip()


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_serve_measures_a_real_server(server: LocalServer, tmp_path: Path, backend: str) -> None:
    output = tmp_path / "serve.json"
    load = ["--num-prompts", "16", "--request-rate", "100", "--input-len", "4:20", "--output-len", "2:9"]
    done = skiff(
        "bench",
        "serve",
        "--base-url",
        server.url,
        "--backend",
        backend,
        "--vocab-size",
        "200",
        *load,
        "--output-json",
        str(output),
    )
    assert done.returncode == 0, done.stderr
    (result,) = figures(output)["runs"]
    assert result["succeeded"] == 16 and result["failures"] == {}
    assert 16 * 2 <= result["output_tokens"] <= 16 * 9


def test_overhead_measures_each_process_of_a_server(server: LocalServer, tmp_path: Path) -> None:
    output = tmp_path / "overhead.json"
    load = ["--num-prompts", "40", "--max-concurrency", "8", "--input-len", "8", "--output-len", "12"]
    done = skiff(
        "bench",
        "overhead",
        "--base-url",
        server.url,
        "--pid",
        str(server.pid),
        *load,
        "--output-json",
        str(output),
    )
    assert done.returncode == 0, done.stderr
    result = figures(output)
    assert sorted(result["processes"]) == ["api", "detokenizer", "rank0", "supervisor", "tokenizer0"]
    assert result["output_tokens"] == 40 * 1 + 40 * 12
    assert result["processes"]["rank0"]["us_per_token"] > 0
    assert result["frontend"]["busy_ratio"] > 0
    assert "api + tokenizers + detokenizer" in done.stdout


def test_overhead_refuses_a_process_that_is_no_service(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("bench", "overhead", "--base-url", server.url)
    error = refuse(monkeypatch, capsys, *flags, "--pid", str(os.getpid()))
    assert "process id of `skiff serve`" in error
    assert "--pid belong together" in refuse(monkeypatch, capsys, *flags)


def test_offline_measures_rounds_and_dumps_their_requests(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "offline.json"
    load = ["--num-prompts", "8", "--input-len", "4:20", "--output-len", "3:9", "--rounds", "2"]
    dump = tmp_path / "workload.json"
    files = ["--output-json", str(output), "--dump-workload", str(dump)]
    done = skiff("bench", "offline", "--model", str(model), *SMALL, *load, *files)
    assert done.returncode == 0, done.stderr
    first, second = figures(output)["rounds"]
    assert first["prompt_tokens"] != second["prompt_tokens"]  # each round has new prompts
    assert all(8 * 3 <= each["output_tokens"] <= 8 * 9 for each in (first, second))
    assert figures(output)["output_tokens_per_second"] == pytest.approx(second["output_tokens_per_second"])
    kinds = second["steps"]["kinds"]
    assert (
        sum(kind["tokens"] for kind in kinds.values())
        == second["prompt_tokens"] + second["output_tokens"] - 8
    )
    assert 0 < sum(kind["seconds"] for kind in kinds.values()) <= second["seconds"] * 1.01
    assert 0 < figures(output)["roofline_ratio"] < 1.5
    dumped = figures(dump)["rounds"]
    for requests, measured in zip(dumped, (first, second), strict=True):
        assert len(requests) == 8
        assert sum(len(each["prompt_token_ids"]) for each in requests) == measured["prompt_tokens"]
        assert sum(each["output_tokens"] for each in requests) == measured["output_tokens"]
    assert "of the roofline" in done.stdout


def test_offline_cycles_adapters_through_fewer_slots(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "offline.json"
    load = ["--num-prompts", "12", "--input-len", "4:20", "--output-len", "3", "--rounds", "1"]
    lora = ["--lora-adapters", "6", "--max-loras", "2", "--max-cpu-loras", "3", "--max-lora-rank", "4"]
    result = ["--output-json", str(output), "--no-roofline"]
    done = skiff("bench", "offline", "--model", str(model), *SMALL, *load, *lora, *result)
    assert done.returncode == 0, done.stderr
    assert figures(output)["rounds"][0]["output_tokens"] == 36
    assert figures(output)["lora_adapters"] == 6
    assert "6 LoRA adapters, 2 slots" in done.stdout
    directories = {Path(each.partition("=")[2]) for each in figures(output)["config"]["lora"]}
    assert len(directories) == 2 and not any(each.exists() for each in directories)
    flags = ("bench", "offline", "--model", str(model), *load, *lora, "--lora-rank", "8", "--no-roofline")
    assert "--lora-rank 8 exceeds --max-lora-rank (4)" in refuse(monkeypatch, capsys, *flags)


def test_offline_hits_shared_prefixes_and_profiles_steps(tmp_path: Path) -> None:
    output, trace = tmp_path / "offline.json", tmp_path / "trace.json.gz"
    shared = [
        "--dataset-name",
        "generated-shared-prefix",
        "--gsp-num-groups",
        "2",
        "--gsp-prompts-per-group",
        "3",
    ]
    load = [
        *shared,
        "--gsp-system-prompt-len",
        "64",
        "--input-len",
        "8",
        "--output-len",
        "100",
        "--rounds",
        "1",
    ]
    result = ["--output-json", str(output), "--profile", str(trace), "--profile-steps", "4", "--no-roofline"]
    done = skiff("bench", "offline", "--model", "demo://", *SMALL, *load, *result)
    assert done.returncode == 0, done.stderr
    [only] = figures(output)["rounds"]
    assert only["prompt_tokens"] == 6 * 72 and only["prefix_hit_tokens"] == 4 * 64
    assert only["prefill_tokens"] == 6 * 72 - 4 * 64
    assert figures(output)["roofline_ratio"] is None and only["roofline"] is None
    kinds = figures(output)["profile"]["kinds"]
    assert kinds["attention"] > 0 and kinds["matmul"] > 0 and kinds["idle"] >= 0
    assert trace.stat().st_size > 1000 and "matmul" in done.stdout


def test_offline_fails_if_no_step_could_be_profiled(model: Path, tmp_path: Path) -> None:
    load = ["--num-prompts", "1", "--input-len", "4", "--output-len", "1", "--rounds", "1", "--no-roofline"]
    trace = str(tmp_path / "trace.json")
    done = skiff("bench", "offline", "--model", str(model), *SMALL, *load, "--profile", trace)
    assert done.returncode != 0 and "over before a step could be profiled" in done.stderr


def test_offline_refuses_lengths_that_cannot_fit(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("bench", "offline", "--model", str(model), "--input-len", "400", "--output-len", "200")
    error = refuse(monkeypatch, capsys, *flags)
    assert "--input-len 400 and --output-len 200 together exceed 512" in error


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.matrix)])
def test_prefill_interference_is_measured_for_each_chunk_size(tmp_path: Path, tp: int) -> None:
    output = tmp_path / "interference.json"
    load = ["--batch-size", "4", "--context-len", "20", "--input-len", "400", "--baseline-steps", "8"]
    flags = [
        *load,
        "--chunk-sizes",
        "all,128,64",
        "--max-num-batched-tokens",
        "204",
        "--max-total-tokens",
        "4096",
    ]
    flags += ["--tp", str(tp), "--cpu-threads", "1"]
    done = skiff("bench", "prefill-interference", *flags, "--output-json", str(output))
    assert done.returncode == 0, done.stderr
    runs = figures(output)["runs"]
    assert [each["mixed_prefill_tokens"] for each in runs] == [None, 128, 64]
    for each, steps in zip(runs, (2, 4, 7), strict=True):
        # A step that was in flight when the prompt arrived gave each decoding request a token, too.
        assert each["steps"] in (steps, steps + 1)
        assert each["baseline_ms"] > 0 and each["median_ms"] <= each["largest_ms"] <= each["ttft_ms"]
        assert each["ratio"] == pytest.approx(each["largest_ms"] / each["baseline_ms"])
    assert "largest ms" in done.stdout


def test_prefill_interference_refuses_a_prompt_beyond_the_context(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refuse(monkeypatch, capsys, "bench", "prefill-interference", "--input-len", "3000")
    assert "exceed --max-model-len (2048)" in error


def test_structured_measures_each_method_of_filling_bitmasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command itself fails if the bitmasks differ between the methods."""
    output = tmp_path / "structured.json"
    flags = ["--batch-size", "1,6", "--threads", "1,2", "--vocab-size", "4096", "--steps", "9"]
    done = skiff("bench", "structured", *flags, "--output-json", str(output))
    assert done.returncode == 0, done.stderr
    found = figures(output)
    assert found["vocab_size"] == 4096
    assert [(each["schema"], each["rows"], each["threads"]) for each in found["runs"]] == [
        (schema, rows, threads)
        for schema in ("free strings", "maxLength 40")
        for rows in (1, 6)
        for threads in (0, 1, 2)
    ]
    assert all(0 < each["median_ms"] <= each["p99_ms"] and each["steps"] == 9 for each in found["runs"])
    assert "row by row" in done.stdout and "p99 ms" in done.stdout
    for flag, value in (("--batch-size", "0"), ("--vocab-size", "511")):
        assert flag in refuse(monkeypatch, capsys, "bench", "structured", flag, value)


def test_cpu_time_equals_that_of_the_kernel(server: LocalServer) -> None:
    for each in find_service_processes(server.pid):
        ticks = each.handle.cpu_times()
        assert each.cpu_seconds() == pytest.approx(ticks.user + ticks.system, abs=0.25)


def test_token_costs_the_difference_of_two_loads() -> None:
    short = LoadCost(1.0, 10, 10, {"api": 0.011})
    long = LoadCost(3.0, 10, 110, {"api": 0.021})
    cost = compute_costs(short, long)["api"]
    assert cost.us_per_token == pytest.approx(100.0)
    assert cost.us_per_request == pytest.approx(1000.0)
    assert cost.busy_ratio == pytest.approx(0.008)


def test_local_server_reports_why_it_did_not_start() -> None:
    with pytest.raises(StartupError, match="/no/such/model"), LocalServer(["--model", "/no/such/model"]):
        pass


def test_local_server_ends_with_its_parent(model: Path) -> None:
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
