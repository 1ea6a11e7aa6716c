"""The tuned numbers that ``skiff tune`` measures: all of them exist, and their workloads launch what they should."""

import json
from dataclasses import fields
from typing import Any

import pytest
from compiling import run_compiling

pytest.importorskip("triton", reason="builds of torch for CPUs may come without Triton")

from skiff_runtime.kernels.tuning import (
    DEFAULT,
    AppendedLoraTuning,
    CopyExchangeTuning,
    GemvAllReduceTuning,
    GroupedGemmRule,
    PrefillChoiceTuning,
    SharedPrefixTuning,
    StreamKRule,
)
from skiff_runtime.tune.measure import get_field
from skiff_runtime.tune.tunables import TUNABLES

LAUNCHES = """
import json, sys
import torch, triton
from torch._subclasses.fake_tensor import FakeTensorMode
from skiff_runtime.kernels.tuning import DEFAULT, overridden
from skiff_runtime.prebuild.offline_driver import use_offline_driver
from skiff_runtime.tune.measure import replace_field
from skiff_runtime.tune.tunables import TUNABLES
from skiff_runtime.tune import moe_tunables, tunables

# Two sets of inputs: further ones launch the same kernels.
tunables.CACHE_BYTES, moe_tunables.CACHE_BYTES = 1, 1 << 20
names = []
triton.JITFunction.run = lambda kernel, *given, **options: names.append(kernel.fn.__name__)
found = {}
device = torch.device("cuda", 0)
with use_offline_driver(90), FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode():
    for tunable in TUNABLES:
        for workload in tunable.workloads:
            make_launches = workload.prepare(device)
            for candidate in tunable.candidates:
                with overridden(replace_field(DEFAULT, tunable.path, candidate)):
                    launches = make_launches()
                    for launch in launches:
                        launch()
            assert not tunable.is_threshold or len(launches) == 2
        found[tunable.path] = sorted(set(names))
        names.clear()
print(json.dumps(found))
"""
UNMEASURED = {
    "measured_on",
    "decode_attention.max_splits",
    "decode_attention.min_split_tokens",
    "decode_attention.max_fused_rows",
    "decode_attention.few_rows",
    "decode_attention.few_splits",
    "decode_attention.few_group_heads",
    "decode_attention.wide_tile",
    "decode_attention.wide_prefix_tile",
    "wide_prefill_tile",
    "gemv.short_inputs",
    "gemv.long_inputs",
    "fp8_gemv.short_inputs",
    "block_fp8.short_inputs",
    "moe.gemv.short_inputs",
    "moe.fp8_gemv.short_inputs",
    "top_k_top_p.min_programs_of_row",
    "top_k_top_p.max_candidates",
    "row_exchange_min_rows",
    "single_row_max_block",
    *(f"shared_prefix.{field.name}" for field in fields(SharedPrefixTuning)),
    *(f"prefill_choice.{field.name}" for field in fields(PrefillChoiceTuning)),
    *(f"lora.rules.{index}" for index in range(len(DEFAULT.lora.rules))),
    "lora.early_outputs",
    *(f"lora.appended.{field.name}" for field in fields(AppendedLoraTuning)),
    *(f"all_reduce.{index}" for index in range(len(DEFAULT.all_reduce))),
    *(f"copy_exchange.{field.name}" for field in fields(CopyExchangeTuning)),
    *(f"gemv_all_reduce.{field.name}" for field in fields(GemvAllReduceTuning)),
}
"""Bounds that divide cases, tiles of rare models, and numbers that only a whole engine or several GPUs can judge."""


def list_fields(value: Any, path: str = "") -> set[str]:
    """Return the paths of all numbers and tiles below ``value``."""
    if type(value).__name__.endswith("Tuning"):
        return {
            found
            for field in fields(value)
            for found in list_fields(getattr(value, field.name), f"{path}.{field.name}".lstrip("."))
        }
    if isinstance(value, tuple):
        return {found for index, item in enumerate(value) for found in list_fields(item, f"{path}.{index}")}
    if isinstance(value, GroupedGemmRule):
        return {f"{path}.gate_up", f"{path}.down"}
    return {f"{path}.tile"} if isinstance(value, StreamKRule) else {path}


def test_every_number_is_measured_or_known_not_to_be() -> None:
    measured = [tunable.path for tunable in TUNABLES]
    assert len(measured) == len(set(measured))
    assert list_fields(DEFAULT) == set(measured) | UNMEASURED
    assert not set(measured) & UNMEASURED


@pytest.mark.parametrize("tunable", TUNABLES, ids=lambda tunable: tunable.path)
def test_candidates_are_of_the_type_of_the_present_value_and_include_it(tunable: Any) -> None:
    present = get_field(DEFAULT, tunable.path)
    assert {type(candidate) for candidate in tunable.candidates} == {type(present)}
    assert tunable.is_threshold or present in tunable.candidates
    assert len({workload.name for workload in tunable.workloads}) == len(tunable.workloads)
    assert not tunable.is_threshold or len(tunable.workloads) == len(tunable.candidates)


def test_workloads_launch_the_kernels_that_their_numbers_are_of() -> None:
    """Tensors and driver are fake, so nothing is computed; every candidate is tried."""
    done = run_compiling("-c", LAUNCHES)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found) == {tunable.path for tunable in TUNABLES}
    for path, kernel in (
        ("decode_attention.throughput_tile", "decode_attention_kernel"),
        ("decode_attention.latency_tile", "gemv_kernel"),
        ("decode_attention.prefix_tile", "shared_prefix_attention_kernel"),
        ("prefill_tile", "prefill_attention_kernel"),
        ("qk_norm_rope_heads", "qk_norm_rope_store_kv_kernel"),
        ("gemv.max_outputs", "gemv_kernel"),
        ("gemv.fuse_silu_and_mul", "gemv_silu_and_mul_kernel"),
        ("fp8_gemv.tile", "fp8_gemv_kernel"),
        ("fp8_gemv.fuse_silu_and_mul", "fp8_gemv_silu_and_mul_kernel"),
        ("fp8_gemv.fuse_silu_and_mul", "quantize_row_kernel"),
        ("fp8_gemv.preloading_tile", "preloading_fp8_gemv_kernel"),
        ("fp8_gemv.max_preloaded_weights", "preloading_fp8_gemv_kernel"),
        ("moe.router_topk_rows", "router_topk_kernel"),
        ("moe.fuse_router_norm", "rms_norm_kernel"),
        ("moe.max_router_topk_tokens", "fused_topk_kernel"),
        ("stream_k.rules.6.tile", "stream_k_gemm_kernel"),
        ("stream_k.max_tokens", "stream_k_gemm_kernel"),
        ("block_fp8.long_gemv_tile", "block_fp8_gemv_kernel"),
        ("block_fp8.rules.3.tile", "block_fp8_stream_k_kernel"),
        ("block_fp8.max_tokens", "block_fp8_stream_k_kernel"),
        ("block_fp8.matrix_tile", "block_fp8_gemm_kernel"),
        ("w4a16.gemv_tile", "int4_gemv_kernel"),
        ("w4a16.rules.2.tile", "int4_stream_k_kernel"),
        ("w4a16.max_tokens", "dequantize_int4_kernel"),
        ("w4a16.dequantize_rows", "dequantize_int4_kernel"),
        ("moe.routing_warps", "fused_topk_kernel"),
        ("moe.max_chunk", "count_experts_kernel"),
        ("moe.gemv.gate_up", "gate_up_gemv_kernel"),
        ("moe.gemv.long_down", "down_gemv_kernel"),
        ("moe.gemv.preload_down", "down_gemv_kernel"),
        ("moe.fp8_gemv.preload_down", "fp8_down_gemv_kernel"),
        ("moe.fp8_gemv.down", "fp8_down_gemv_kernel"),
        ("moe.rules.0.gate_up", "gate_up_kernel"),
        ("moe.fp8_rules.0.down", "down_kernel"),
        ("moe.block_fp8_rules.3.down", "quantize_groups_kernel"),
        ("moe.sum_block", "moe_sum_kernel"),
        ("single_row_chunk", "quantize_chunk_kernel"),
        ("sampling_block", "sample_blocks_kernel"),
        ("top_k_top_p.chunk", "find_thresholds_kernel"),
    ):
        assert kernel in found[path], path
