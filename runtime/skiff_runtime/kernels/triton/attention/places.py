"""Where a paged cache has the K and V of some tokens."""

import triton
import triton.language as tl


@triton.jit
def paged_kv_offsets(
    first: tl.tensor,
    end: tl.tensor,
    table: tl.tensor,
    kv_head: tl.tensor,
    KV: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(The tokens from ``first`` on, which of them are before ``end``, where their K and V begin), for heads so wide."""
    token = first + tl.arange(0, BLOCK)
    seen = token < end
    page = tl.load(table + token // PAGE, seen, 0).to(tl.int64)
    return token, seen, (page * PAGE + token % PAGE) * (KV * WIDTH) + kv_head * WIDTH
