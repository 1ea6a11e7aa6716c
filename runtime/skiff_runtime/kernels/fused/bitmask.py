"""Masks with one bit for each token, applied in one launch."""

import torch
import triton
import triton.language as tl

from skiff_runtime.kernels.bitmask import MASK_BITS
from skiff_runtime.kernels.fused.overlap import await_previous, launch_options, let_next_start

BLOCK = 4096
"""Logits of a row that one program masks."""
_WORD = tl.constexpr(MASK_BITS)


@triton.jit(do_not_specialize_on_alignment=["rows", "masks"])
def _keep_admitted(
    logits: tl.tensor,
    rows: tl.tensor,
    masks: tl.tensor,
    stride: tl.tensor,
    VOCAB: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    let_next_start(EARLY)
    await_previous(EARLY)
    mask = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < VOCAB
    word = tl.load(masks + mask * WORDS + token // _WORD, inside, 0)
    refused = (word >> (token % _WORD)) & 1 == 0
    tl.store(logits + tl.load(rows + mask) * stride + token, -float("inf"), inside & refused)


def keep_admitted(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    """As ``kernels.bitmask.keep_admitted``; logits with rows at any stride."""
    count, words = masks.shape
    vocab = logits.shape[1]
    _keep_admitted[(count, triton.cdiv(vocab, BLOCK))](
        *(logits, rows, masks, logits.stride(0)),
        VOCAB=vocab,
        WORDS=words,
        BLOCK=BLOCK,
        num_warps=4,
        **launch_options(logits.device),
    )
