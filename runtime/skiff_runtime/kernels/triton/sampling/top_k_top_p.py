"""What top_k and top_p leave of each row of logits: the least of it, found without sorting.

Four launches, whose programs see a part of a row each, but for the last one's. They find the largest logit; count, or weigh, what
is not below each of some keys (``floor_search``) at fixed distances from it; put together what is not below the one that is
enough, mostly some hundred numbers; and search among these. Sums have a fixed order, so a row's result depends on nothing else.
"""

from typing import Any, Final

import torch
import triton
import triton.language as tl

from skiff_runtime.kernels.triton.runtime.dependent_launch import (
    launch_dependents,
    pdl_options,
    wait_for_dependencies,
)
from skiff_runtime.kernels.triton.sampling.floor_parts import (
    chunk_maxima_kernel,
    gather_candidates_kernel,
    partial_sums_kernel,
    select_pivot,
    wishes,
)
from skiff_runtime.kernels.triton.sampling.floor_search import search_threshold, value_of

PIVOTS: Final = 8
"""Keys that are compared with in one pass."""
PART: Final = 8192
"""Logits of a row that are weighed, and counted, together."""
BLOCK: Final = 1024
"""Of a part, those that are looked at at a time."""
PROGRAMS: Final = 1024
"""Of all rows; more would fill the GPU no better, and cost the longer to start the more rows have nothing to find."""
LEAST_PROGRAMS: Final = 4
"""Of a row."""
ROOM: Final = 4096
"""Of a row, those that can be put together, and are searched at a time."""
_SPARE_BITS: Final = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
"""Of a float32, the last ones, that say nothing where it was one of these types."""


@triton.jit(do_not_specialize_on_alignment=["slots"])
def find_thresholds_kernel(
    logits: tl.tensor,
    slots: tl.tensor,
    filters: tl.tensor,
    maxima: tl.tensor,
    sums: tl.tensor,
    near: tl.tensor,
    floors: tl.tensor,
    stride: tl.tensor,
    VOCAB: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
    ROOM: tl.constexpr,
    SPARE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """The least scaled logit that is kept of each row, by a search among what was put together, or through the row."""
    launch_dependents(PDL)
    wait_for_dependencies(PDL)
    row = tl.program_id(0).to(tl.int64)
    temperature, top_k, top_p, counts, asks = wishes(slots, filters, row, VOCAB)
    floor = -float("inf")
    if asks:
        amounts, low, high, end, largest, scale, wanted = select_pivot(
            maxima, sums, row, temperature, top_k, top_p, counts, PARTS, PARTS_BLOCK, PIVOTS, SPARE
        )
        asked = low, high, end, largest, scale, wanted, top_p, counts
        count = tl.sum(amounts, 0)
        if count <= ROOM:
            low = search_threshold(near + row * ROOM, count, *asked, PIVOTS, ROOM, SPARE)
        else:
            low = search_threshold(logits + row * stride, VOCAB, *asked, PIVOTS, ROOM, SPARE)
        floor = tl.div_rn(value_of(low, SPARE), temperature)
    tl.store(floors + row, floor)


def find_thresholds(
    logits: torch.Tensor, slots: torch.Tensor, filters: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The least scaled logits that top_k, then top_p, keep of logits [S, vocab]: float32[S]; -inf where neither is asked for.

    ``filters`` as ``kernels.sampling.choose`` takes them. Also the largest logits of each row's parts, float32[S, parts], for
    rows that ask for one of these or for min_p; rows that ask for none cost next to nothing.
    """
    (rows, vocab), device = logits.shape, logits.device
    parts = triton.cdiv(vocab, PART)
    maxima = torch.empty((rows, parts), dtype=torch.float32, device=device)
    sums = torch.empty((rows, parts, 2, PIVOTS), dtype=torch.float32, device=device)
    near = torch.empty((rows, ROOM), dtype=torch.float32, device=device)
    floors = torch.empty(rows, dtype=torch.float32, device=device)
    if rows == 0:
        return floors, maxima
    known, early = (logits, slots, filters, maxima), pdl_options(device)
    grid = rows, min(parts, max(LEAST_PROGRAMS, PROGRAMS // rows))
    sizes: dict[str, Any] = {"VOCAB": vocab, "PARTS": parts}
    chunk_maxima_kernel[grid](*known, logits.stride(0), **sizes, PART=PART, num_warps=8, **early)
    sizes |= {
        "PARTS_BLOCK": triton.next_power_of_2(parts),
        "PIVOTS": PIVOTS,
        "SPARE": _SPARE_BITS[logits.dtype],
    }
    each: dict[str, Any] = {"PART": PART, "BLOCK": BLOCK, "num_warps": 4}
    partial_sums_kernel[grid](*known, sums, logits.stride(0), **sizes, **each, **early)
    gather_candidates_kernel[grid](*known, sums, near, logits.stride(0), **sizes, **each, ROOM=ROOM, **early)
    find_thresholds_kernel[(rows,)](
        *known, sums, near, floors, logits.stride(0), **sizes, ROOM=ROOM, num_warps=8, **early
    )
    return floors, maxima
