"""The table of tuned numbers: chosen by device, overridden for measurements, and valid for the kernels that read it."""

from dataclasses import replace

import pytest
import torch

from skiff_runtime.kernels import tuning
from skiff_runtime.kernels.constants import FP8_BLOCK
from skiff_runtime.kernels.tuning import DEFAULT, HOPPER, TUNINGS, Tuning, overridden, tuning_for

CPU = torch.device("cpu")


def test_a_cpu_has_its_own_numbers() -> None:
    assert tuning_for(CPU) is tuning.CPU


def test_a_gpu_takes_the_table_of_its_compute_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = pytest.importorskip("skiff_runtime.kernels.triton.runtime.device_properties")
    other = replace(HOPPER, measured_on="another GPU")
    monkeypatch.setitem(TUNINGS, 120, other)
    for capability, expected in ((90, HOPPER), (120, other), (80, DEFAULT)):
        monkeypatch.setattr(properties, "compute_capability", lambda _, found=capability: found)
        tuning._lookup.cache_clear()
        assert tuning_for(torch.device("cuda", 0)) is expected
    tuning._lookup.cache_clear()


def test_override_ends_with_its_context_even_after_an_error() -> None:
    first, second = replace(DEFAULT, sampling_block=64), replace(DEFAULT, sampling_block=128)
    with overridden(first):
        with pytest.raises(ValueError), overridden(second):
            assert tuning_for(CPU) is second
            raise ValueError
        assert tuning_for(CPU) is first
    assert tuning_for(CPU) is tuning.CPU


@pytest.mark.parametrize("table", [DEFAULT, *TUNINGS.values()], ids=lambda table: table.measured_on)
def test_sizes_of_blocks_are_powers_of_two(table: Tuning) -> None:
    """Triton supports no other sizes."""
    decode = table.decode_attention
    tiles = [decode.throughput_tile, decode.latency_tile, decode.fp8_latency_tile, decode.wide_tile]
    tiles += [decode.prefix_tile, decode.wide_prefix_tile]
    sizes = [tile.tokens for tile in tiles] + [decode.max_group_heads, decode.few_group_heads]
    sizes += [
        each for tile in (table.prefill_tile, table.wide_prefill_tile) for each in (tile.queries, tile.tokens)
    ]
    sizes += [tile.columns for tile in (table.gemv.edge_tile, table.gemv.tile, table.gemv.uneven_tile)]
    sizes += [tile.columns for tile in (table.gemv_all_reduce.tile, table.gemv_all_reduce.long_tile)]
    sizes += [tile.columns for tile in (table.fp8_gemv.tile, table.fp8_gemv.long_tile)]
    sizes.append(table.fp8_gemv.preloading_tile.columns)
    for rules in (table.stream_k.rules, table.block_fp8.rules, table.w4a16.rules):
        sizes += [rule.tile.inputs for rule in rules]
    sizes += [tile.columns for tile in (table.block_fp8.gemv_tile, table.block_fp8.long_gemv_tile)]
    sizes += [table.block_fp8.matrix_tile.tokens, table.block_fp8.matrix_tile.outputs]
    sizes += [table.w4a16.gemv_tile.words, table.w4a16.dequantize_rows]
    moe = table.moe
    for rule in (*moe.rules, *moe.fp8_rules, *moe.block_fp8_rules):
        sizes += [
            rule.rows,
            *(size for tile in (rule.gate_up, rule.down) for size in (tile.outputs, tile.inputs)),
        ]
    sizes += [
        tile.columns
        for each in (moe.gemv, moe.fp8_gemv)
        for tile in (each.gate_up, each.down, each.long_down)
    ]
    sizes += [moe.routing_warps, moe.max_chunk, moe.sum_block]
    search = table.top_k_top_p
    sizes += [search.chunk, search.block, search.max_candidates]
    sizes += [table.qk_norm_rope_heads, table.single_row_chunk, table.sampling_block]
    assert all(size > 0 and size & (size - 1) == 0 for size in sizes)


@pytest.mark.parametrize("table", [DEFAULT, *TUNINGS.values()], ids=lambda table: table.measured_on)
def test_every_profitable_stream_k_product_has_a_tile(table: Tuning) -> None:
    for rules, most in (
        (table.stream_k.rules, max(table.stream_k.max_tokens, table.stream_k.max_tokens_of_tall)),
        (table.block_fp8.rules, table.block_fp8.max_tokens),
        (table.w4a16.rules, table.w4a16.max_tokens),
    ):
        for inputs in range(128, 8192, 128):
            for tokens in range(1, most + 1):
                assert any(
                    tokens <= rule.max_tokens
                    and (rule.max_inputs is None or inputs <= rule.max_inputs)
                    and inputs % rule.tile.inputs == 0
                    for rule in rules
                ), (tokens, inputs)


@pytest.mark.parametrize("table", [DEFAULT, *TUNINGS.values()], ids=lambda table: table.measured_on)
def test_rows_of_a_tile_have_one_scale_of_block_fp8(table: Tuning) -> None:
    assert FP8_BLOCK % table.block_fp8.matrix_tile.outputs == 0


SHARED_MEMORY_BYTES = 227 << 10
"""Of one program on compute capability 9.0."""


@pytest.mark.parametrize("table", [DEFAULT, *TUNINGS.values()], ids=lambda table: table.measured_on)
def test_rules_of_experts_are_complete_and_fit_the_shared_memory(table: Tuning) -> None:
    moe = table.moe
    for rules, item_bytes in ((moe.rules, 2), (moe.fp8_rules, 1), (moe.block_fp8_rules, 1)):
        bounds = [rule.max_rows for rule in rules[:-1] if rule.max_rows is not None]
        assert len(bounds) == len(rules) - 1 and bounds == sorted(bounds) and rules[-1].max_rows is None
        for rule in rules:
            for tile, weights in ((rule.gate_up, 2), (rule.down, 1)):
                block = (rule.rows + weights * tile.outputs) * tile.inputs * item_bytes
                assert block * tile.stages <= SHARED_MEMORY_BYTES, (rule, tile)
    for rule in moe.block_fp8_rules:
        for tile in (rule.gate_up, rule.down):
            assert tile.inputs == 128 and 128 % tile.outputs == 0, "a tile has one scale for each row"
