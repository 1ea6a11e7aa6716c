"""Penalties on tokens that a text contains already, in two launches for any number of rows and tokens.

``count_tokens_kernel`` counts each token of a text in a cell of its row and token. ``apply_penalties_kernel`` goes
over the text once more: of the places where a token stands, whichever takes the count out of the cell first (an
atomic exchange with 0) changes the logit, and the others find nothing. So each logit is changed once, by a program
that does not matter, and no pass over the vocabulary is needed.
"""

import torch
import triton
import triton.language as tl

from skiff_runtime.kernels.constants import LARGEST_LOGIT
from skiff_runtime.kernels.triton.runtime.dependent_launch import (
    launch_dependents,
    pdl_options,
    wait_for_dependencies,
)

BLOCK = 512
"""Tokens of a text that a program handles at a time. This and PROGRAMS_OF_ROW were not compared with others."""
PROGRAMS_OF_ROW = 8
_LARGEST_LOGIT = tl.constexpr(LARGEST_LOGIT)
_SEEN = tl.constexpr(1 << 30)
"""The bit of a cell that marks a token of the prompt; the bits below it count the token in the output."""


@triton.jit(do_not_specialize_on_alignment=["slots", "ends"])
def count_tokens_kernel(
    slots: tl.tensor,
    ends: tl.tensor,
    tokens: tl.tensor,
    prompt_lens: tl.tensor,
    counts: tl.tensor,
    stride: tl.tensor,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Count the tokens of one row's text.

    Grid: (rows, PROGRAMS_OF_ROW), whose programs take turns at blocks of the text.

    slots, ends         int32 [rows]: the row's slot, and the length of its text
    tokens              int32 [slots, n], rows ``stride`` apart
    prompt_lens         int64 [slots]: how many of the first tokens are the prompt
    counts              int32 [rows, VOCAB], all zero before
    """
    launch_dependents(PDL)
    wait_for_dependencies(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    end = tl.load(ends + row)
    prompt_len = tl.load(prompt_lens + slot)
    for first in range(tl.program_id(1) * BLOCK, end, tl.num_programs(1) * BLOCK):
        position = first + tl.arange(0, BLOCK)
        inside = position < end
        cell = counts + row * VOCAB + tl.load(tokens + slot * stride + position, inside, 0)
        tl.atomic_add(cell, 1, inside & (position >= prompt_len), sem="relaxed")
        tl.atomic_or(cell, _SEEN, inside & (position < prompt_len), sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=["rows", "slots", "ends"])
def apply_penalties_kernel(
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
    """Penalize the logits of one row's text.

    Grid: as ``count_tokens_kernel``, whose arguments these are and

    logits              float32 [S, VOCAB], rows ``logits_stride`` apart, changed in place
    rows                int64 [rows]: the row of the logits
    penalties           float32 [slots, 3]: repetition, presence, frequency
    counts              int32 [rows, VOCAB], all zero again afterwards
    """
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
        position = first + tl.arange(0, BLOCK)
        inside = position < end
        token = tl.load(tokens + slot * stride + position, inside, 0)
        count = tl.atomic_xchg(counts + row * VOCAB + token, 0, inside, sem="relaxed")
        is_first = inside & (count != 0)
        value = tl.load(logits + token, is_first, 0.0)
        output = (count & (_SEEN - 1)).to(tl.float32)
        value = tl.where(value > 0, tl.div_rn(value, repetition + tl.zeros_like(value)), value * repetition)
        value = value - frequency * output - tl.where(output > 0, presence, 0.0)
        value = tl.minimum(tl.maximum(value, -_LARGEST_LOGIT), _LARGEST_LOGIT)
        tl.store(logits + token, value, is_first)


def apply_penalties(
    logits: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    ends: torch.Tensor,
    tokens: torch.Tensor,
    prompt_lens: torch.Tensor,
    penalties: torch.Tensor,
) -> None:
    """Do what ``kernels.penalties.apply_penalties`` does, with logits at any row stride."""
    count, vocab = len(rows), logits.shape[1]
    counts = torch.zeros((count, vocab), dtype=torch.int32, device=logits.device)
    options = {
        "VOCAB": vocab,
        "BLOCK": BLOCK,
        "num_warps": 4,
        **pdl_options(logits.device),
    }
    grid = count, PROGRAMS_OF_ROW
    count_tokens_kernel[grid](slots, ends, tokens, prompt_lens, counts, tokens.stride(0), **options)
    apply_penalties_kernel[grid](
        *(logits, rows, slots, ends, tokens, penalties, counts, logits.stride(0), tokens.stride(0)), **options
    )
