"""Where a paged cache has K and V."""

import triton
import triton.language as tl


@triton.jit
def places_of(
    token: tl.tensor,
    seen: tl.tensor,
    table: tl.tensor,
    kv_head: tl.tensor,
    KV: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
) -> tl.tensor:
    """Where K and V of tokens begin, for heads that are so wide."""
    page = tl.load(table + token // PAGE, seen, 0).to(tl.int64)
    return (page * PAGE + token % PAGE) * (KV * WIDTH) + kv_head * WIDTH
