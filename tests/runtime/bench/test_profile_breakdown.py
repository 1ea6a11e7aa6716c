"""The breakdown of a profile by kind of kernel."""

import json
from pathlib import Path

import pytest

from skiff_runtime.bench.offline.profile_breakdown import (
    TraceEvent,
    break_down,
    classify_kernel,
    compute_self_times,
    read_trace,
)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("void flash::flash_fwd_kernel<...>", "attention"),
        ("decode_attention_kernel", "attention"),
        ("shared_prefix_attention_kernel", "attention"),
        ("merge_splits_kernel", "attention"),
        ("nvjet_tst_128x64_64x6_1x2_h_bz_coopA_TNT", "matmul"),
        ("fp8_gemv_kernel", "matmul"),
        ("gemv_silu_and_mul_kernel", "matmul"),
        ("gemv_push_kernel", "matmul"),
        ("stream_k_gemm_kernel", "matmul"),
        ("aten::addmm", "matmul"),
        ("aten::add", "other"),
        *(
            (name, "sampling")
            for name in (
                "sample_blocks_kernel",
                "sample_tokens_kernel",
                "chunk_maxima_kernel",
                "partial_sums_kernel",
                "gather_candidates_kernel",
                "sample_shard_kernel",
                "max_sampling_keys_kernel",
                "take_sampled_tokens_kernel",
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
        *(
            (name, "experts")
            for name in (
                "fused_topk_kernel",
                "router_topk_kernel",
                "count_experts_kernel",
                "moe_align_block_size_kernel",
                "gate_up_kernel",
                "down_kernel",
                "fp8_gate_up_gemv_kernel",
                "fp8_down_gemv_kernel",
                "moe_sum_kernel",
            )
        ),
        ("rms_norm_kernel", "other"),
        ("Memcpy HtoD (Pinned -> Device)", "other"),
    ],
)
def test_kernels_are_classified_by_name(name: str, kind: str) -> None:
    assert classify_kernel(name) == kind


def test_idle_time_is_that_without_any_event() -> None:
    lane, other = ("0", "1"), ("0", "2")
    events = [
        TraceEvent("gemm", 1.0, 2.0, lane),
        TraceEvent("decode_attention_kernel", 2.0, 2.0, other),
        TraceEvent("x", 6.0, 1.0, lane),
    ]
    found = break_down(events)
    assert found.span == 6.0
    assert found.kinds == {
        "experts": 0.0,
        "attention": 2.0,
        "matmul": 2.0,
        "sampling": 0.0,
        "other": 1.0,
        "idle": 2.0,
    }
    assert break_down([]).span == 0.0


def test_self_times_leave_out_called_operations() -> None:
    lane = ("0", "1")
    events = [
        TraceEvent("outer", 0.0, 10.0, lane),
        TraceEvent("inner", 1.0, 4.0, lane),
        TraceEvent("deep", 2.0, 1.0, lane),
    ]
    events += [TraceEvent("next", 6.0, 2.0, lane), TraceEvent("elsewhere", 1.0, 1.0, ("0", "2"))]
    found = {event.name: event.seconds for event in compute_self_times(events)}
    assert found == {"outer": 4.0, "inner": 3.0, "deep": 1.0, "next": 2.0, "elsewhere": 1.0}


def test_operations_of_the_host_are_ignored_in_a_trace_with_kernels(tmp_path: Path) -> None:
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
