"""The roofline of a workload, and the measurement of a device's peak rates."""

import subprocess
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skiff_runtime.bench.offline import device_peaks
from skiff_runtime.bench.offline.roofline import (
    DevicePeaks,
    ModelCost,
    RequestShape,
    compute_model_cost,
    estimate_roofline,
)
from skiff_runtime.bench.offline.throughput import measure_device_peaks
from skiff_runtime.config import Config
from skiff_runtime.processes.resolve import resolve

H200 = DevicePeaks(bytes_per_second=4.3e12, flops_per_second=790e12)


def roofline_seconds(model: str, requests: list[RequestShape], **changes: object) -> float:
    settings: dict[str, object] = {"model": f"shape://{model}", "load_format": "dummy", "device": "cpu"}
    config, described = resolve(Config(**{**settings, **changes}))  # type: ignore[arg-type]
    cost = compute_model_cost(config, described)
    return estimate_roofline(cost, requests, max_running=256, peaks=H200).seconds


@pytest.mark.parametrize(
    ("model", "milliseconds"), [("qwen3-0.6b", 0.28), ("llama-3.1-8b", 3.5), ("qwen3-14b", 6.5)]
)
def test_step_of_one_request_reads_the_weights_once(model: str, milliseconds: float) -> None:
    """The expected times are the published sizes of the weights over the copy rate."""
    step = roofline_seconds(model, [RequestShape(1, 3)]) - roofline_seconds(model, [RequestShape(1, 2)])
    assert step * 1e3 == pytest.approx(milliseconds, rel=0.03)


@pytest.mark.parametrize(("rows", "gigabytes"), [(1, 6.1), (8, 25.8), (64, 59.5), (256, 60.4)])
def test_step_of_a_mixture_reads_the_experts_that_its_tokens_touch(rows: int, gigabytes: float) -> None:
    """Of 128 experts a layer, 1, 8, 64 and 256 tokens are expected to touch 8, 52, 126 and 128."""
    longer, shorter = ([RequestShape(1, length, group=row) for row in range(rows)] for length in (3, 2))
    step = roofline_seconds("qwen3-30b-a3b", longer) - roofline_seconds("qwen3-30b-a3b", shorter)
    assert step * H200.bytes_per_second == pytest.approx(gigabytes * 1e9, rel=0.01)


def test_ranks_share_the_experts_either_way() -> None:
    short = [RequestShape(10, 100)]
    whole = roofline_seconds("qwen3-235b-a22b", short)
    columns, experts = (
        roofline_seconds("qwen3-235b-a22b", short, tp_size=4, expert_parallel=each) for each in (False, True)
    )
    assert columns == experts and 0.24 < columns / whole < 0.27


@pytest.mark.parametrize(("model", "tokens_per_second"), [("qwen3-0.6b", 40_000), ("qwen3-14b", 7_700)])
def test_roofline_of_the_offline_workload(model: str, tokens_per_second: float) -> None:
    generator = np.random.default_rng(0)
    lengths = generator.integers(100, 1025, size=(256, 2)).tolist()
    requests = [RequestShape(prompt, output, group=number) for number, (prompt, output) in enumerate(lengths)]
    seconds = roofline_seconds(model, requests)
    assert sum(each.output for each in requests) / seconds == pytest.approx(tokens_per_second, rel=0.15)


def test_shared_prefixes_are_computed_and_read_once() -> None:
    alone = [RequestShape(2176, 128, group=number) for number in range(1024)]
    shared = [RequestShape(2176, 128, 2048, number % 64) for number in range(1024)]
    assert roofline_seconds("llama-3.1-8b", shared) < 0.7 * roofline_seconds("llama-3.1-8b", alone)
    one = [RequestShape(2176, 128, 2048, 0)]
    assert roofline_seconds("llama-3.1-8b", one) == pytest.approx(roofline_seconds("llama-3.1-8b", alone[:1]))


def test_last_layer_counts_for_the_last_token_of_a_prompt_only() -> None:
    config, model = resolve(Config(model="shape://qwen3-0.6b", load_format="dummy", device="cpu"))
    cost, layers = compute_model_cost(config, model), model.num_layers
    found = estimate_roofline(cost, [RequestShape(1000, 1)], max_running=1, peaks=H200)
    tokens = 1000 * cost.token_flops + 1000 * 1001 / 2 * cost.attended_flops
    last = cost.token_flops / layers + cost.head_flops
    assert found.prefill_seconds * H200.flops_per_second == pytest.approx(
        tokens * (layers - 1) / layers + last
    )


def test_fp8_halves_the_memory_traffic() -> None:
    short = [RequestShape(10, 100)]
    plain = roofline_seconds("qwen3-14b", short)
    assert 0.5 < roofline_seconds("qwen3-14b", short, quantization="fp8") / plain < 0.56
    long = [RequestShape(30_000, 100)]
    cached = roofline_seconds("qwen3-14b", long, kv_cache_dtype="fp8_e4m3")
    assert cached < roofline_seconds("qwen3-14b", long)


@given(
    windows=st.lists(st.none() | st.integers(1, 60), min_size=1, max_size=4),
    requests=st.lists(
        st.builds(RequestShape, st.integers(1, 50), st.integers(1, 20), group=st.integers(0, 99)),
        min_size=1,
        max_size=5,
    ),
)
def test_windows_bound_what_is_computed_and_read(
    windows: list[int | None], requests: list[RequestShape]
) -> None:
    """Against counting each token of each layer; only the last token of a prompt needs the last layer."""
    layers = len(windows)
    cost = ModelCost(0, 0, 0, 0, 0, kv_bytes=layers, attended_flops=layers, windows=tuple(windows))
    found = estimate_roofline(cost, requests, max_running=9, peaks=DevicePeaks(1, 1))
    read = sum(
        min(context, window or context)
        for request in requests
        for context in range(request.prompt + 1, request.prompt + request.output)
        for window in windows
    )
    computed = sum(
        min(position, window or position)
        for request in requests
        for position in range(1, request.prompt + 1)
        for window in windows[:-1]
    )
    assert found.decode_seconds == pytest.approx(read)
    assert found.prefill_seconds == pytest.approx(computed)


def test_shared_prefix_is_read_once_as_far_as_windows_reach() -> None:
    """Two rows of 12 and 10 tokens share the first 8 and have a window of 5: one reads from token 7 on, one from 5."""
    cost = ModelCost(0, 0, 0, 0, 0, kv_bytes=1, attended_flops=0, windows=(5,))
    requests = [RequestShape(11, 2, 8, 0), RequestShape(9, 2, 8, 0)]
    found = estimate_roofline(cost, requests, max_running=2, peaks=DevicePeaks(1, 1))
    assert found.decode_seconds == (12 - 8) + (10 - 8) + (8 - 5)


def test_requests_beyond_the_running_limit_wait() -> None:
    config, model = resolve(Config(model="shape://qwen3-0.6b", load_format="dummy", device="cpu"))
    cost, requests = compute_model_cost(config, model), [RequestShape(5, 11)] * 6
    assert estimate_roofline(cost, requests, max_running=2, peaks=H200).decode_steps == 30
    assert estimate_roofline(cost, requests, max_running=6, peaks=H200).decode_steps == 10


SMALL_PEAKS = """
import sys
from skiff_runtime.bench.offline import device_peaks

device_peaks.COPY_BYTES["cpu"], device_peaks.MATRIX_SIZE["cpu"] = 16 << 20, 256
device_peaks.main(sys.argv[1:])
"""
"""The child process with a shorter copy and smaller matrices."""


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peak_rates_are_measured_in_a_child_process(dtype: str) -> None:
    """In float32 this is also part of the offline benchmark in ``test_real_service.py``."""
    peaks = measure_device_peaks("cpu", dtype, 1)
    assert peaks.bytes_per_second > 1e8 and peaks.flops_per_second > 1e8


def test_small_product_in_bfloat16_is_measured_in_a_child_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs the guard against machines that announce AMX and trap its instructions."""
    run = subprocess.run

    def run_small(command: list[str], **options: Any) -> Any:
        executable, *module, device, dtype, threads = command
        assert module == ["-m", device_peaks.__name__]
        return run([executable, "-c", SMALL_PEAKS, device, dtype, threads], **options)

    monkeypatch.setattr(subprocess, "run", run_small)
    peaks = measure_device_peaks("cpu", "bfloat16", 1)
    assert peaks.bytes_per_second > 1e8 and peaks.flops_per_second > 1e8


@pytest.mark.parametrize(("seconds", "calls"), [(0.001, 13), (0.5, 5), (7.0, 2)])
def test_slow_device_is_measured_by_fewer_repetitions(
    monkeypatch: pytest.MonkeyPatch, seconds: float, calls: int
) -> None:
    """A CPU may take seconds for one product. The first is always a warm-up, which here takes twice as long."""
    now = 0.0
    done = 0

    def work() -> None:
        nonlocal now, done
        done += 1
        now += seconds * (2 if done == 1 else 1)

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    assert device_peaks.measure_median_seconds("cpu", work) == pytest.approx(seconds)
    assert done == calls
