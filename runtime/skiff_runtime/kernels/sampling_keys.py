"""Sampling keys: the best score of a row and its token in one integer, so that one maximum over ranks finds the token.

The problem: each rank has the logits of a shard of the vocabulary, and the token is the argmax over all shards. The
idea: a key holds the score above and the token below, both so encoded that the larger key is the better choice. The
score is its float32 bits made monotonic (those of negative numbers are inverted, and -0 counts as +0); the token is
complemented, so of equal scores the lowest token wins, as it does in an argmax over the whole row. A maximum of
integers depends on no order, so every rank gets the same token, and the one that a single rank with all logits would
take.
"""

from typing import Final

import torch

from skiff_runtime.step import NAN_LOGITS

TOKEN_BITS: Final = 31
"""The low bits of a key, which hold the complement of the token."""
TOKEN_MASK: Final = (1 << TOKEN_BITS) - 1
NAN_KEY: Final = (1 << 63) - 1
"""The key of a score that is NaN, which no number has; it wins, so that every rank learns of it."""
LOWEST_KEY: Final = -(1 << 63)
"""Less than the key of any score and token."""


def encode_keys(scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the keys int64 [S] of ``scores`` float32 [S] and ``tokens`` int [S]."""
    bits = (scores + 0.0).view(torch.int32)
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    keys = (order << TOKEN_BITS) | (tokens.long() ^ TOKEN_MASK)
    return keys.masked_fill_(scores.isnan(), NAN_KEY)


def decode_tokens(keys: torch.Tensor) -> torch.Tensor:
    """Return the tokens int64 [S] of ``keys`` int64 [S]; ``NAN_LOGITS`` where the score is NaN."""
    return ((keys & TOKEN_MASK) ^ TOKEN_MASK).masked_fill_(keys == NAN_KEY, NAN_LOGITS)
