"""The simulated cluster: it repeats itself, loses nothing, and its pods take the time that their steps should take."""

import json
from pathlib import Path

import numpy as np
import pytest

from skiff_runtime.__main__ import main
from skiff_runtime.bench.routing.sessions import Session, SimulatedRequest
from skiff_runtime.bench.routing.simulated_pod import SimulatedPod
from skiff_runtime.bench.routing.simulation import POLICIES, Cluster, ClusterSpec, Outcome
from skiff_runtime.bench.routing.step_times import StepTimes

TIMES = StepTimes()


def simulate(policy: str, workload: str, *, seed: int = 3, rate: float = 12.0, pods: int = 4) -> Outcome:
    spec = ClusterSpec(
        pods=pods, routers=2, workload=workload, rate=rate, seconds=8.0, seed=seed, kv_tokens=200_000
    )
    return Cluster(spec, policy).run()


@pytest.mark.parametrize("policy", POLICIES)
def test_equal_seeds_give_equal_figures(policy: str) -> None:
    assert simulate(policy, "agents", pods=2) == simulate(policy, "agents", pods=2)


def test_prefix_policy_finds_more_and_answers_sooner_than_chance() -> None:
    ours, chance = simulate("prefix", "agents"), simulate("random", "agents")
    assert ours.hit_rate > chance.hit_rate + 0.05
    assert np.percentile(ours.ttft_seconds, 99) < np.percentile(chance.ttft_seconds, 99) / 2


def test_every_request_ends_and_every_page_is_accounted_for() -> None:
    spec = ClusterSpec(
        pods=2, routers=1, workload="chat", rate=20.0, seconds=6.0, seed=5, kv_tokens=30_000, max_running=16
    )
    cluster = Cluster(spec, "prefix")
    outcome = cluster.run()
    assert outcome.requests == cluster._sent > 100
    for pod in cluster._pods:
        assert pod.requests == 0
        pod._pool.check(np.empty(0, np.int32))


def request(prompt: int, output: int, seed: int = 1) -> SimulatedRequest:
    random = np.random.default_rng(seed)
    tokens = random.integers(0, 1 << 30, prompt + output, dtype=np.int32)
    return SimulatedRequest(Session(), tokens[:prompt], tokens[prompt:], key=0)


def finish(pod: SimulatedPod) -> float:
    """Run a pod until it is idle; return the time."""
    now = 0.0
    while (moment := pod.step_ends_at) is not None:
        now = moment
        pod.end_step(now)
    return now


def make_pod() -> SimulatedPod:
    return SimulatedPod(kv_tokens=100_000, max_running=64, max_step_tokens=8192)


def test_request_alone_takes_the_time_of_its_steps() -> None:
    pod, alone = make_pod(), request(10_000, 100)
    predicted = pod.predict_first_token(alone, 0.0)
    pod.submit(alone, 0.0)
    end = finish(pod)
    prefill = TIMES.mixed(0, 0, 8192, 8192 * 4096) + TIMES.mixed(0, 0, 1808, 1808 * (8192 + 904))
    assert alone.first_token_at == pytest.approx(prefill)
    assert predicted == pytest.approx(prefill, rel=0.2), "but for attention over what came before"
    assert end - prefill == pytest.approx(TIMES.decode_run(1, 10_000, 99))


def test_same_prompt_again_computes_its_last_page_alone() -> None:
    pod = make_pod()
    pod.submit(request(4096, 10), 0.0)
    finish(pod)
    again = request(4096, 10)
    pod.submit(again, 0.0)
    assert again.cached_tokens == 4096 - 16
    assert pod.predict_first_token(request(4096, 10), 0.0) < 0.02


def test_arrival_ends_a_run_of_decode_steps_behind_the_one_at_hand() -> None:
    pod = make_pod()
    pod.submit(request(100, 60), 0.0)
    pod.end_step(pod.step_ends_at or 0.0)
    began = TIMES.mixed(0, 0, 100, 5000)
    pod.submit(request(100, 5, seed=2), began + TIMES.decode_run(1, 100, 3) + 1e-6)
    assert pod.step_ends_at == pytest.approx(began + TIMES.decode_run(1, 100, 4))


@pytest.mark.parametrize("steps", [1, 2, 37, 64])
def test_decode_steps_are_counted_as_they_are_timed(steps: int) -> None:
    seconds = TIMES.decode_run(20, 9000, steps)
    assert TIMES.count_decode_steps(20, 9000, seconds - 1e-9, 64) == steps
    assert TIMES.count_decode_steps(20, 9000, 0.0, 64) == 1


def test_formula_gives_the_measured_times() -> None:
    """Llama-3.1-8B on an H200, of docs/lab: batch 1, 64 streams of 700 tokens, and a prompt of 32,768 beside them."""
    assert TIMES.decode(1, 400) == pytest.approx(3.83e-3, rel=0.03)
    assert TIMES.decode(64, 64 * 700) == pytest.approx(6.2e-3, rel=0.03)
    chunks = [(start, min(8128, 32768 - start)) for start in range(0, 32768, 8128)]
    steps = [TIMES.mixed(64, 64 * 700, size, size * (2 * start + size) // 2) for start, size in chunks]
    assert sum(steps) == pytest.approx(1.30, rel=0.03)
    assert max(steps) == pytest.approx(0.41, rel=0.05)


def test_command_prints_and_writes_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    flags = ["--pods", "2", "--seconds", "4", "--workload", "few-shot,random", "--policy", "prefix,oracle"]
    assert main(["bench", "routing", *flags, "--output-json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "few-shot" in printed and "oracle" in printed
    runs = json.loads(file.read_text())["runs"]
    assert [(each["spec"]["workload"], each["policy"]) for each in runs] == [
        ("few-shot", "prefix"),
        ("few-shot", "oracle"),
        ("random", "prefix"),
        ("random", "oracle"),
    ]
    assert all(each["ttft_ms"]["p50"] <= each["ttft_ms"]["p99"] for each in runs)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--policy", "best"], "--policy 'best'"),
        (["--workload", "x"], "--workload 'x'"),
        (["--pods", "2000"], "--pods"),
    ],
)
def test_flag_out_of_range_is_named(flags: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "routing", *flags]) == 2
    assert named in capsys.readouterr().err
