"""Penalties by two launches, however many rows and however long their texts: tokens are counted, then logits changed.

A cell is counted for each row and token of the vocabulary. Of the places of a text where a token stands, whichever takes its
count first changes its logit, and leaves nothing to the others; so each is changed once, and it does not matter by whom.
"""

import torch
import triton
import triton.language as tl

from skiff_runtime.kernels.penalties import LARGEST_LOGIT
from skiff_runtime.kernels.triton.runtime.dependent_launch import (
    launch_dependents,
    pdl_options,
    wait_for_dependencies,
)

BLOCK = 512
"""Tokens of a text that a program looks at together."""
PARTS = 8
"""Programs for each row, which take turns at its text."""
_LARGEST_LOGIT = tl.constexpr(LARGEST_LOGIT)
_SEEN = tl.constexpr(1 << 30)
"""A token of the prompt; below it, how often the token stands in the output."""


@triton.jit(do_not_specialize_on_alignment=["slots", "ends"])
def count_tokens_kernel(
    slots: tl.tensor,
    ends: tl.tensor,
    tokens: tl.tensor,
    prompts: tl.tensor,
    counts: tl.tensor,
    stride: tl.tensor,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_dependents(PDL)
    wait_for_dependencies(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    end = tl.load(ends + row)
    prompt = tl.load(prompts + slot)
    for first in range(tl.program_id(1) * BLOCK, end, tl.num_programs(1) * BLOCK):
        place = first + tl.arange(0, BLOCK)
        inside = place < end
        cell = counts + row * VOCAB + tl.load(tokens + slot * stride + place, inside, 0)
        tl.atomic_add(cell, 1, inside & (place >= prompt), sem="relaxed")
        tl.atomic_or(cell, _SEEN, inside & (place < prompt), sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=["rows", "slots", "ends"])
def _penalize(
    logits: tl.tensor,
    rows: tl.tensor,
    slots: tl.tensor,
    ends: tl.tensor,
    tokens: tl.tensor,
    penalties: tl.tensor,
    counts: tl.tensor,
    logits_stride: tl.tensor,
    stride: tl.tensor,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_dependents(PDL)
    wait_for_dependencies(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    end = tl.load(ends + row)
    repetition = tl.load(penalties + slot * 3)
    presence = tl.load(penalties + slot * 3 + 1)
    frequency = tl.load(penalties + slot * 3 + 2)
    logits += tl.load(rows + row) * logits_stride
    for first in range(tl.program_id(1) * BLOCK, end, tl.num_programs(1) * BLOCK):
        place = first + tl.arange(0, BLOCK)
        inside = place < end
        token = tl.load(tokens + slot * stride + place, inside, 0)
        count = tl.atomic_xchg(counts + row * VOCAB + token, 0, inside, sem="relaxed")
        first_here = inside & (count != 0)
        value = tl.load(logits + token, first_here, 0.0)
        output = (count & (_SEEN - 1)).to(tl.float32)
        value = tl.where(value > 0, tl.div_rn(value, repetition + tl.zeros_like(value)), value * repetition)
        value = value - frequency * output - tl.where(output > 0, presence, 0.0)
        value = tl.minimum(tl.maximum(value, -_LARGEST_LOGIT), _LARGEST_LOGIT)
        tl.store(logits + token, value, first_here)


def apply_penalties(
    logits: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    ends: torch.Tensor,
    tokens: torch.Tensor,
    prompts: torch.Tensor,
    penalties: torch.Tensor,
) -> None:
    """As ``kernels.penalties.penalize``; logits with rows at any stride."""
    count, vocab = len(rows), logits.shape[1]
    counts = torch.zeros((count, vocab), dtype=torch.int32, device=logits.device)
    options = {
        "VOCAB": vocab,
        "BLOCK": BLOCK,
        "num_warps": 4,
        **pdl_options(logits.device),
    }
    count_tokens_kernel[(count, PARTS)](slots, ends, tokens, prompts, counts, tokens.stride(0), **options)
    _penalize[(count, PARTS)](
        *(logits, rows, slots, ends, tokens, penalties, counts, logits.stride(0), tokens.stride(0)), **options
    )
