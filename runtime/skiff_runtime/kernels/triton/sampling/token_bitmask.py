"""Token bitmasks of grammars, applied to logits in one launch."""

import torch
import triton
import triton.language as tl

from skiff_runtime.kernels.constants import BITS_PER_WORD
from skiff_runtime.kernels.triton.runtime.dependent_launch import (
    launch_dependents,
    pdl_options,
    wait_for_dependencies,
)

BLOCK = 4096
"""Logits of a row that one program masks; not compared with others."""
_BITS_PER_WORD = tl.constexpr(BITS_PER_WORD)


@triton.jit(do_not_specialize_on_alignment=["rows", "masks"])
def apply_token_bitmask_kernel(
    logits: tl.tensor,
    rows: tl.tensor,
    masks: tl.tensor,
    stride: tl.tensor,
    VOCAB: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Set the logits of one block of one masked row to -inf where the bit of the token is 0.

    Grid: (masks, blocks of BLOCK logits).

    logits              [S, VOCAB], rows ``stride`` apart, changed in place
    rows                int64 [masks]: the row of the logits that the mask belongs to
    masks               int32 [masks, WORDS]; the lowest bit of the first word is that of token 0
    """
    launch_dependents(PDL)
    wait_for_dependencies(PDL)
    mask = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < VOCAB
    word = tl.load(masks + mask * WORDS + token // _BITS_PER_WORD, inside, 0)
    masked = (word >> (token % _BITS_PER_WORD)) & 1 == 0
    tl.store(logits + tl.load(rows + mask) * stride + token, -float("inf"), inside & masked)


def apply_token_bitmask(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    """Do what ``kernels.token_bitmask.apply_token_bitmask`` does, with logits at any row stride."""
    count, words = masks.shape
    vocab = logits.shape[1]
    apply_token_bitmask_kernel[(count, triton.cdiv(vocab, BLOCK))](
        *(logits, rows, masks, logits.stride(0)),
        VOCAB=vocab,
        WORDS=words,
        BLOCK=BLOCK,
        num_warps=4,
        **pdl_options(logits.device),
    )
