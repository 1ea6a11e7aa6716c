"""Sorting of pairs by expert: every pair once, in order, in whole blocks; uneven routing; windows of experts."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from kernel_device import DEVICE, combine

from skiff_runtime.kernels.triton.moe.moe_align_block_size import max_row_blocks, moe_align_block_size
from skiff_runtime.kernels.tuning import DEFAULT, overridden, tuning_for

pytestmark = pytest.mark.usefixtures("poisoned")


def sort_pairs(ids: list[int], first: int, experts: int, rows: int) -> tuple[list[list[int]], list[int]]:
    """Return (the pairs of each block, its expert)."""
    blocks, owners = [], []
    for expert in range(experts):
        own = [pair for pair, chosen in enumerate(ids) if chosen - first == expert]
        for at in range(0, len(own), rows):
            filled = own[at : at + rows]
            blocks.append(filled + [len(ids)] * (rows - len(filled)))
            owners.append(expert)
    return blocks, owners


def random_ids(tokens: int, experts: int, top_k: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, experts, generator=generator).topk(top_k).indices.int()


def check(ids: torch.Tensor, first: int, experts: int, rows: int) -> None:
    found = moe_align_block_size(ids.to(DEVICE), first_expert=first, experts=experts, rows=rows)
    blocks, owners = sort_pairs(ids.flatten().tolist(), first, experts, rows)
    count = int(found.num_blocks)
    most = len(found.expert_ids)
    assert count == len(blocks) <= most == max_row_blocks(ids.numel(), experts, rows)
    assert found.pair_ids.view(most, rows)[:count].tolist() == blocks
    assert found.expert_ids[:count].tolist() == owners


@contextmanager
def max_chunk(pairs: int) -> Iterator[None]:
    """Sort with few pairs in a chunk, so that they are counted by a launch of its own, or with many."""
    table = tuning_for(DEVICE) if DEVICE.type == "cuda" else DEFAULT
    with overridden(replace(table, moe=replace(table.moe, max_chunk=pairs))):
        yield


CHUNKS = [256, 4096]


@pytest.mark.parametrize(
    ("shape", "rows", "chunk"),
    combine([(1, 8, 8), (2, 128, 8), (33, 8, 2), (70, 60, 4), (130, 24, 8), (700, 16, 1)], [16, 64], CHUNKS),
)
def test_pairs_are_sorted_by_expert_in_whole_blocks(
    shape: tuple[int, int, int], rows: int, chunk: int
) -> None:
    tokens, experts, top_k = shape
    with max_chunk(chunk):
        check(random_ids(tokens, experts, top_k), 0, experts, rows)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_all_tokens_may_choose_the_same_experts(chunk: int) -> None:
    with max_chunk(chunk):
        check(torch.full((300, 1), 5, dtype=torch.int32), 0, 32, 16)
        check(torch.tensor([[31, 0]] * 150, dtype=torch.int32), 0, 32, 16)


@pytest.mark.parametrize(("first", "chunk"), [(0, 256), (5, 256), (5, 4096), (12, 4096)])
def test_pairs_of_experts_elsewhere_are_left_out(first: int, chunk: int) -> None:
    with max_chunk(chunk):
        check(random_ids(200, 16, 3), first, 4, 16)


def test_no_pair_may_be_here() -> None:
    found = moe_align_block_size(
        torch.zeros((9, 2), dtype=torch.int32, device=DEVICE), first_expert=8, experts=8, rows=16
    )
    assert int(found.num_blocks) == 0


@pytest.mark.parametrize("rows", [1, 16, 128])
@pytest.mark.parametrize("experts", [1, 7, 128])
def test_bound_of_blocks_is_reached_and_not_exceeded(experts: int, rows: int) -> None:
    for pairs in range(1, 400, 7):
        # The most blocks: as many experts as possible have one pair, and the others go where they fill blocks.
        single = min(experts, pairs)
        most = single + (pairs - single) // rows
        assert most <= max_row_blocks(pairs, experts, rows)
        assert max_row_blocks(pairs, experts, rows) - most <= 1
