"""LoRA's products against float64: adapters of many ranks in one step, layers of several parts, untouched outputs."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_device import DEVICE, HALF, TOLERANCE, combine, error, noise

from skiff_runtime.contract import MAX_LORA_RANK
from skiff_runtime.kernels.lora import (
    MAX_CALL_IDS,
    LoraMapping,
    LoraWeights,
    LoraWorkspace,
    add_lora,
)
from skiff_runtime.kernels.triton.lora import add_lora as kernel
from skiff_runtime.kernels.triton.lora.group_tokens import EPOCHS
from skiff_runtime.kernels.tuning import LoraRule, LoraTile, overridden, tuning_for
from skiff_runtime.step import NO_LORA_SLOT

pytestmark = pytest.mark.usefixtures("poisoned")

LORAS = 5
TYPES = (torch.float32, HALF)
VECTORS = LoraTile(rows=1, chunk=64, inputs=32, outputs=32)
BLOCKS = LoraTile(rows=16, chunk=64, inputs=32, outputs=32, stages=2)
WIDE_BLOCKS = LoraTile(rows=64, chunk=32, inputs=32, outputs=64, warps=8, stages=2)
TILES = (VECTORS, BLOCKS, WIDE_BLOCKS)
LAYERS = [(48, (32,)), (100, (64, 16, 16)), (200, (50, 50))]
"""Inputs and outputs of the parts."""


@contextmanager
def use_tile(tile: LoraTile) -> Iterator[None]:
    tuning = tuning_for(DEVICE)
    with overridden(replace(tuning, lora=replace(tuning.lora, rules=(LoraRule(None, tile),)))):
        yield


def make_workspace(max_tokens: int, max_rank: int = 16, loras: int = LORAS) -> LoraWorkspace:
    return LoraWorkspace(DEVICE, max_tokens=max_tokens, max_loras=loras, max_rank=max_rank, has_kernels=True)


def make_weights(
    workspace: LoraWorkspace,
    inputs: int,
    parts: tuple[int, ...],
    ranks: list[int],
    max_rank: int,
    dtype: torch.dtype,
    seed: int = 1,
) -> LoraWeights:
    """Fill slots with adapters of these ranks; what lies behind a rank is zero, as an adapter's loading leaves it."""
    a = noise(len(ranks), len(parts), max_rank, inputs, dtype=dtype, seed=seed) / inputs**0.5
    b = noise(len(ranks), sum(parts), max_rank, dtype=dtype, seed=seed + 1)
    for slot, rank in enumerate(ranks):
        a[slot, :, rank:], b[slot, :, rank:] = 0, 0
    return LoraWeights(
        a, b, torch.tensor(ranks, dtype=torch.int32, device=DEVICE), parts, workspace.new_call_id()
    )


def choose_variant(tokens: int, inputs: int, parts: tuple[int, ...]) -> tuple[object, ...]:
    _, options = kernel.choose_options(
        tokens,
        inputs,
        parts,
        max_loras=LORAS,
        max_rank=16,
        dtype=HALF,
        device=DEVICE,
        x_is_complete=False,
    )
    return (inputs, parts, *options.values())


def test_every_variant_is_among_those_of_the_found_numbers_of_tokens() -> None:
    layers, limit = [(4096, (4096, 1024, 1024)), (4096, (4096,))], 1500
    found = kernel.find_token_counts_by_variant(
        layers, max_tokens=limit, max_loras=LORAS, max_rank=16, dtype=HALF, device=DEVICE
    )

    def variants(counts: Iterable[int]) -> set[tuple[object, ...]]:
        return {choose_variant(tokens, *layer) for tokens in counts for layer in layers}

    assert (
        variants(found) == variants(range(1, limit + 1)) > variants(1 << exponent for exponent in range(11))
    )


def test_variants_of_large_steps_are_found_even_if_small_ones_have_the_same() -> None:
    """Small steps may compute A x in the base product, and then launch no kernel of their variant."""
    layers = [(4096, (4096,))]
    limits: dict[str, Any] = {"max_loras": LORAS, "max_rank": 16, "dtype": HALF, "device": DEVICE}
    small = kernel.find_token_counts_by_variant(layers, max_tokens=512, **limits)
    found = kernel.find_token_counts_by_variant(layers, max_tokens=512, max_deferred=256, **limits)
    variants = {choose_variant(tokens, *layers[0]) for tokens in range(257, 513)}
    assert {choose_variant(tokens, *layers[0]) for tokens in found if tokens > 256} == variants
    assert {choose_variant(tokens, *layers[0]) for tokens in small if tokens > 256} < variants


def compute_exactly(
    out: torch.Tensor, x: torch.Tensor, weights: LoraWeights, slots: list[int]
) -> torch.Tensor:
    """Return what ``add_lora`` should make of ``out``, in float64 but for A x, which is rounded like x."""
    expected = out.double().cpu()
    for token, slot in enumerate(slots):
        if slot == NO_LORA_SLOT:
            continue
        first = 0
        for part, size in enumerate(weights.part_sizes):
            inner = (weights.a[slot, part].double() @ x[token].double()).to(x.dtype).double()
            expected[token, first : first + size] += (
                weights.b[slot, first : first + size].double() @ inner
            ).cpu()
            first += size
    return expected


def call(out: torch.Tensor, x: torch.Tensor, weights: LoraWeights, mapping: LoraMapping, early: bool) -> None:
    kernel.add_lora(out, x, weights, mapping, x_is_complete=early)


def to_slots(slots: list[int]) -> torch.Tensor:
    return torch.tensor(slots, dtype=torch.int32, device=DEVICE)


def random_slots(tokens: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    slots: list[int] = torch.randint(NO_LORA_SLOT, LORAS, (tokens,), generator=generator).tolist()
    return slots


@pytest.mark.parametrize(
    ("layer", "tile", "tokens", "dtype", "early"),
    combine(LAYERS, TILES, (1, 7, 40), TYPES, (False, True)),
)
def test_products_of_mixed_adapters_are_added(
    layer: tuple[int, tuple[int, ...]], tile: LoraTile, tokens: int, dtype: torch.dtype, early: bool
) -> None:
    (inputs, parts), slots = layer, random_slots(tokens)
    x = noise(tokens, 2 * inputs, dtype=dtype)[:, :inputs]
    out = noise(tokens, sum(parts), dtype=dtype, seed=3)
    with use_tile(tile):
        workspace = make_workspace(tokens)
        weights = make_weights(workspace, inputs, parts, [16, 8, 0, 1, 13], 16, dtype)
        expected = compute_exactly(out, x, weights, slots)
        before = out.clone()
        call(out, x, weights, workspace.map_tokens(to_slots(slots)), early)
    assert error(out, expected) < TOLERANCE[dtype]
    untouched = [token for token, slot in enumerate(slots) if slot in {NO_LORA_SLOT, 2}]
    assert torch.equal(out[untouched], before[untouched])


@pytest.mark.parametrize(("max_rank", "tile", "dtype"), combine([1, 8, 20, 32, 40, 64, 128], TILES, TYPES))
def test_every_rank_up_to_the_largest_is_added(max_rank: int, tile: LoraTile, dtype: torch.dtype) -> None:
    slots = [0, 1, NO_LORA_SLOT, 1, 2]
    x, out = noise(5, 80, dtype=dtype), noise(5, 48, dtype=dtype, seed=3)
    with use_tile(tile):
        workspace = make_workspace(5, max_rank, loras=3)
        weights = make_weights(workspace, 80, (48,), [max_rank, 1, max_rank // 2], max_rank, dtype)
        expected = compute_exactly(out, x, weights, slots)
        call(out, x, weights, workspace.map_tokens(to_slots(slots)), True)
    assert error(out, expected) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("tile", TILES)
def test_numbers_of_an_earlier_adapter_behind_the_rank_do_not_count(tile: LoraTile) -> None:
    slots = [1, 0, 1]
    x, out = noise(3, 80, dtype=HALF), noise(3, 48, dtype=HALF, seed=3)
    with use_tile(tile):
        workspace = make_workspace(3, loras=2)
        weights = make_weights(workspace, 80, (48,), [5, 12], 16, HALF)
        expected = compute_exactly(out, x, weights, slots)
        for slot, rank in enumerate([5, 12]):
            weights.a[slot, :, rank:], weights.b[slot, :, rank:] = torch.nan, 3
        call(out, x, weights, workspace.map_tokens(to_slots(slots)), False)
    assert error(out, expected) < TOLERANCE[HALF]


@pytest.mark.parametrize("tile", TILES)
def test_nothing_is_written_without_adapters(tile: LoraTile) -> None:
    x, out = noise(6, 80, dtype=HALF), noise(6, 48, dtype=HALF, seed=3)
    before = out.clone()
    with use_tile(tile):
        workspace = make_workspace(6)
        weights = make_weights(workspace, 80, (48,), [16] * LORAS, 16, HALF)
        mapping = workspace.map_tokens(to_slots([NO_LORA_SLOT] * 6))
        call(out, x, weights, mapping, False)
    assert mapping.blocks is not None and int(mapping.blocks.num_blocks) == 0
    assert torch.equal(out, before)


@pytest.mark.parametrize("tile", TILES)
def test_layers_and_steps_share_the_memory_of_partial_sums(tile: LoraTile) -> None:
    """Partial sums of another layer or step, in the same words, are never taken for those of this one."""
    with use_tile(tile):
        workspace = make_workspace(9)
        layers = [
            make_weights(workspace, inputs, parts, [16, 8, 4, 1, 13], 16, HALF, seed=10 * at)
            for at, (inputs, parts) in enumerate(LAYERS)
        ]
        for step in range(3):
            slots = random_slots(9, step)
            mapping = workspace.map_tokens(to_slots(slots))
            for at, weights in enumerate(layers):
                inputs, parts = LAYERS[at]
                x = noise(9, inputs, dtype=HALF, seed=step)
                out = noise(9, sum(parts), dtype=HALF, seed=step + 5)
                expected = compute_exactly(out, x, weights, slots)
                call(out, x, weights, mapping, step == 1)
                assert error(out, expected) < TOLERANCE[HALF], (step, at)


def test_epochs_begin_again_with_cleared_words() -> None:
    with use_tile(BLOCKS):
        workspace = make_workspace(9)
        memory = workspace.kernel_memory
        assert memory is not None
        memory.epoch.fill_(EPOCHS - 2)
        memory.words.fill_(7)
        workspace.map_tokens(to_slots(random_slots(9)))
        assert int(memory.epoch) == EPOCHS - 1 and int(memory.words.min()) == 7
        workspace.map_tokens(to_slots(random_slots(9)))
        assert int(memory.epoch) == 1 and int(memory.words.abs().max()) == 0


def test_steps_of_other_sizes_follow_each_other() -> None:
    """The rules of a GPU's table, at the bounds between them."""
    bounds = [rule.max_tokens for rule in tuning_for(DEVICE).lora.rules]
    sizes = [1, *(bound + 1 for bound in bounds if bound)] if DEVICE.type == "cuda" else [1, 5]
    workspace = make_workspace(max(sizes))
    weights = make_weights(workspace, 80, (48, 32), [16, 8, 4, 1, 13], 16, HALF)
    for tokens in (*sizes, *reversed(sizes)):
        slots = random_slots(tokens)
        x, out = noise(tokens, 80, dtype=HALF), noise(tokens, 80, dtype=HALF, seed=3)
        expected = compute_exactly(out, x, weights, slots)
        call(out, x, weights, workspace.map_tokens(to_slots(slots)), False)
        assert error(out, expected) < TOLERANCE[HALF], tokens


@pytest.mark.parametrize(("layer", "dtype"), combine(LAYERS, TYPES))
def test_reference_adds_the_same(layer: tuple[int, tuple[int, ...]], dtype: torch.dtype) -> None:
    (inputs, parts), slots = layer, random_slots(20)
    x, out = noise(20, inputs, dtype=dtype).cpu(), noise(20, sum(parts), dtype=dtype, seed=3).cpu()
    workspace = LoraWorkspace(torch.device("cpu"), max_tokens=20, max_loras=LORAS, max_rank=16)
    made = make_weights(workspace, inputs, parts, [16, 8, 0, 1, 13], 16, dtype)
    weights = replace(made, a=made.a.cpu(), b=made.b.cpu(), ranks=made.ranks.cpu())
    expected = compute_exactly(out, x, weights, slots)
    mapping = workspace.map_tokens(torch.tensor(slots, dtype=torch.int32))
    assert mapping.blocks is None
    add_lora(out, x, weights, mapping)
    assert error(out, expected) < TOLERANCE[dtype]


def test_call_ids_differ_and_end() -> None:
    workspace = LoraWorkspace(torch.device("cpu"), max_tokens=1, max_loras=1, max_rank=1)
    assert [int(workspace.new_call_id()) for _ in range(MAX_CALL_IDS)] == list(range(MAX_CALL_IDS))
    with pytest.raises(ValueError, match="linear layers"):
        workspace.new_call_id()


@pytest.mark.parametrize("max_rank", [0, MAX_LORA_RANK + 1])
def test_other_ranks_are_refused(max_rank: int) -> None:
    with pytest.raises(ValueError, match="LoRA ranks"):
        make_workspace(1, max_rank)
