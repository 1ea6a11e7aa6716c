"""The softmax of scores that come piece by piece (Milakov and Gimelshein, 2018)."""

from typing import Final

import triton
import triton.language as tl

LOG2_E: Final = 1.4426950408889634
"""Scores are multiplied by it, as powers of two are one instruction."""


@triton.jit
def init_online_softmax(QUERIES: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """(Total, highest score), both [Q], before the first token."""
    return tl.zeros((QUERIES,), tl.float32), tl.full((QUERIES,), -float("inf"), tl.float32)


@triton.jit
def online_softmax_update(
    score: tl.tensor, seen: tl.tensor, total: tl.tensor, highest: tl.tensor, TOKENS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """(Shares of these tokens, by what earlier sums shrink, the new total, the new highest score).

    ``score`` has T tokens in its dimension ``TOKENS``, and Q queries in the other. ``seen``, of that shape or one that
    becomes it, tells which of them count; ``total`` and ``highest`` [Q].
    """
    score = tl.where(seen, score, -float("inf"))
    higher = tl.maximum(highest, tl.max(score, TOKENS))
    share = tl.exp2(score - tl.expand_dims(higher, TOKENS))
    kept = tl.exp2(highest - higher)
    return share, kept, total * kept + tl.sum(share, TOKENS), higher
