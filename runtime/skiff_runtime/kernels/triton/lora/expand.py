"""LoRA's second product, B (A x), inside the kernel that reads a layer's output next.

The problem: behind a library's product ``add_lora`` cannot start early, and for some dozens of tokens its launch takes
longer than its bytes. The idea: A of all slots lies behind the rows of the base matrix, so one product computes A x
as well, and the next kernel (RoPE, SwiGLU or a norm), which reads the output anyway, adds B (A x) to it. No launch
and no exchange between programs is left.

Cost: A of all slots is read, and multiplied with every token, so that the slots must be few: ``LoraTuning.appended``.
"""

from typing import Final

import triton
import triton.language as tl

RANK_BLOCK: Final = 16
"""Columns of B that are multiplied at a time: 32 bytes of each row in a type of two bytes."""


@triton.jit
def expand_row(
    inner: tl.tensor,
    b: tl.tensor,
    rank: tl.tensor,
    columns: tl.tensor,
    inside: tl.tensor,
    MAX_RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
) -> tl.tensor:
    """Return B (A x) of one token at some outputs, float32 [outputs].

    No load waits for the rank: columns beyond it are multiplied by 0.

    inner               [MAX_RANK]: A x of the token
    b                   [outputs, MAX_RANK] of the token's slot
    rank                int32: the rank of the slot, 0 for a token without one
    columns, inside     int32 and bool [outputs]: the outputs, and which of them exist; none for a token without a slot
    """
    added = tl.zeros(columns.shape, tl.float32)
    for first in tl.static_range(0, MAX_RANK, RANK_BLOCK):
        r = first + tl.arange(0, RANK_BLOCK)
        is_read = inside[:, None] & (r < MAX_RANK)[None, :]
        values = tl.load(b + columns[:, None] * MAX_RANK + r[None, :], is_read, 0.0)
        factor = tl.load(inner + r, r < MAX_RANK, 0.0).to(tl.float32)
        factor = tl.where(r < rank, factor, 0.0)
        added += tl.sum(values.to(tl.float32) * factor[None, :], 1)
    return added
