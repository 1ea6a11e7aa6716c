"""The least time of a workload, and where the time of profiled steps goes."""

import json
from pathlib import Path

import numpy as np
import pytest

from skiff_runtime.bench.offline.device_peaks import copied_bytes, matrix_operations
from skiff_runtime.bench.offline.profile_breakdown import Event, break_down, own_times, part_of, read_trace
from skiff_runtime.bench.offline.roofline import Load, Rates, floor, work_of
from skiff_runtime.bench.rates import measure
from skiff_runtime.config import Config
from skiff_runtime.processes.resolve import resolve

H200 = Rates(copied_bytes=4.3e12, matrix_operations=790e12)


def least_seconds(model: str, loads: list[Load], **changes: object) -> float:
    settings: dict[str, object] = {"model": f"shape://{model}", "load_format": "dummy", "device": "cpu"}
    config, described = resolve(Config(**{**settings, **changes}))  # type: ignore[arg-type]
    return floor(work_of(config, described), loads, running=256, rates=H200).seconds


@pytest.mark.parametrize(
    ("model", "milliseconds"), [("qwen3-0.6b", 0.28), ("llama-3.1-8b", 3.5), ("qwen3-14b", 6.5)]
)
def test_a_step_of_one_request_reads_the_weights_once(model: str, milliseconds: float) -> None:
    """What the makers' sizes give by hand: weights over the copy rate."""
    step = least_seconds(model, [Load(1, 3)]) - least_seconds(model, [Load(1, 2)])
    assert step * 1e3 == pytest.approx(milliseconds, rel=0.03)


@pytest.mark.parametrize(("model", "tokens_per_second"), [("qwen3-0.6b", 40_000), ("qwen3-14b", 7_700)])
def test_offline_workload(model: str, tokens_per_second: float) -> None:
    generator = np.random.default_rng(0)
    lengths = generator.integers(100, 1025, size=(256, 2)).tolist()
    loads = [Load(prompt, output, group=number) for number, (prompt, output) in enumerate(lengths)]
    least = least_seconds(model, loads)
    assert sum(load.output for load in loads) / least == pytest.approx(tokens_per_second, rel=0.15)


def test_shared_prefixes_are_computed_and_read_once() -> None:
    alone = [Load(2176, 128, group=number) for number in range(1024)]
    shared = [Load(2176, 128, 2048, number % 64) for number in range(1024)]
    assert least_seconds("llama-3.1-8b", shared) < 0.7 * least_seconds("llama-3.1-8b", alone)
    one = [Load(2176, 128, 2048, 0)]
    assert least_seconds("llama-3.1-8b", one) == pytest.approx(least_seconds("llama-3.1-8b", alone[:1]))


def test_the_last_layer_counts_for_the_last_token_of_a_prompt() -> None:
    config, model = resolve(Config(model="shape://qwen3-0.6b", load_format="dummy", device="cpu"))
    work, layers = work_of(config, model), model.num_layers
    found = floor(work, [Load(1000, 1)], running=1, rates=H200).prefill_seconds * H200.matrix_operations
    tokens = 1000 * work.token_operations + 1000 * 1001 / 2 * work.attended_operations
    last = work.token_operations / layers + work.head_operations
    assert found == pytest.approx(tokens * (layers - 1) / layers + last)


def test_eight_bits_halve_what_is_read() -> None:
    loads = [Load(10, 100)]
    plain = least_seconds("qwen3-14b", loads)
    assert 0.5 < least_seconds("qwen3-14b", loads, quantization="fp8") / plain < 0.56
    long = [Load(30_000, 100)]
    cached = least_seconds("qwen3-14b", long, kv_cache_dtype="fp8_e4m3")
    assert cached < least_seconds("qwen3-14b", long)


def test_more_requests_than_places_take_turns() -> None:
    config, model = resolve(Config(model="shape://qwen3-0.6b", load_format="dummy", device="cpu"))
    work = work_of(config, model)
    assert floor(work, [Load(5, 11)] * 6, running=2, rates=H200).decode_steps == 30
    assert floor(work, [Load(5, 11)] * 6, running=6, rates=H200).decode_steps == 10


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_rates_are_seen_by_a_process_of_their_own(kind: str) -> None:
    """Whatever this machine announces and cannot do."""
    rates = measure("cpu", kind, 1)
    assert rates.copied_bytes > 1e8 and rates.matrix_operations > 1e8


def test_rates_of_this_machine() -> None:
    assert copied_bytes("cpu") > 1e8 and matrix_operations("cpu", "float32") > 1e8


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("void flash::flash_fwd_kernel<...>", "attention"),
        ("decode_attention_kernel", "attention"),
        ("shared_prefix_attention_kernel", "attention"),
        ("merge_splits_kernel", "attention"),
        ("nvjet_tst_128x64_64x6_1x2_h_bz_coopA_TNT", "matrix work"),
        ("fp8_gemv_kernel", "matrix work"),
        ("stream_k_gemm_kernel", "matrix work"),
        ("aten::addmm", "matrix work"),
        ("aten::add", "rest"),
        *(
            (name, "sampling")
            for name in (
                "sample_blocks_kernel",
                "sample_tokens_kernel",
                "chunk_maxima_kernel",
                "partial_sums_kernel",
                "gather_candidates_kernel",
            )
        ),
        *(
            (name, "sampling")
            for name in (
                "find_thresholds_kernel",
                "count_tokens_kernel",
                "apply_penalties_kernel",
                "apply_token_bitmask_kernel",
            )
        ),
        ("rms_norm_kernel", "rest"),
        ("Memcpy HtoD (Pinned -> Device)", "rest"),
    ],
)
def test_parts_by_name(name: str, part: str) -> None:
    assert part_of(name) == part


def test_idle_is_what_no_work_covers() -> None:
    lane, other = ("0", "1"), ("0", "2")
    events = [
        Event("gemm", 1.0, 2.0, lane),
        Event("decode_attention_kernel", 2.0, 2.0, other),
        Event("x", 6.0, 1.0, lane),
    ]
    found = break_down(events)
    assert found.span == 6.0
    assert found.parts == {"attention": 2.0, "matrix work": 2.0, "sampling": 0.0, "rest": 1.0, "idle": 2.0}
    assert break_down([]).span == 0.0


def test_operations_count_without_those_that_they_call() -> None:
    lane = ("0", "1")
    events = [Event("outer", 0.0, 10.0, lane), Event("inner", 1.0, 4.0, lane), Event("deep", 2.0, 1.0, lane)]
    events += [Event("next", 6.0, 2.0, lane), Event("elsewhere", 1.0, 1.0, ("0", "2"))]
    own = {event.name: event.seconds for event in own_times(events)}
    assert own == {"outer": 4.0, "inner": 3.0, "deep": 1.0, "next": 2.0, "elsewhere": 1.0}


def test_kernels_of_a_trace_hide_the_operations_of_the_host(tmp_path: Path) -> None:
    entries = [
        {"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 50, "pid": 1, "tid": 1},
        {"cat": "kernel", "name": "nvjet", "ts": 10, "dur": 20, "pid": 0, "tid": 7},
        {"cat": "kernel", "name": "instant", "ts": 10, "pid": 0, "tid": 7},
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": entries}))
    assert [event.name for event in read_trace(path)] == ["nvjet"]
    path.write_text(json.dumps({"traceEvents": entries[:1]}))
    assert [event.name for event in read_trace(path)] == ["aten::mm"]
