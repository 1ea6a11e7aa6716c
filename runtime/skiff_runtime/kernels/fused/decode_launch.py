"""Attention of one token a row: how its kernels are launched."""

from typing import Any, Final

import torch
import triton

from skiff_runtime.kernels.fused import decode_attention
from skiff_runtime.kernels.fused.launch import Repeated
from skiff_runtime.kernels.fused.overlap import launch_options
from skiff_runtime.kernels.fused.tiles import decode_tiles, prefix_tiles
from skiff_runtime.kernels.fused.widen import has_assembly
from skiff_runtime.kernels.prefixes import SharedPrefixes

LOG2_E: Final = 1.4426950408889634
PROGRAMS: Final = 700
"""Decode makes about so many programs at least, which is enough where rows with long contexts come first."""
MAX_SPLITS: Final = 64
MIN_SPLIT: Final = 256
"""Tokens of the longest context for which another split pays."""
GROUP_HEADS: Final = 64
"""Query heads that read a prefix together, at most, as one tile of the tensor cores."""
FEW_HEADS: Final = 16
"""So few of them take a smaller tile."""

Sides = tuple[torch.Tensor, torch.Tensor]
"""K and V of a layer, each [tokens of the pool, kv_heads, d]."""


def splits_of(rows: int, kv_heads: int, longest: int) -> int:
    """Into how many parts each row is cut: by what is known before the contexts are."""
    wanted = round(PROGRAMS / (rows * kv_heads))
    return max(1, min(wanted, MAX_SPLITS, -(-longest // MIN_SPLIT)))


def members_of(heads: int, kv_heads: int) -> int:
    """How many rows read a prefix together."""
    return max(1, GROUP_HEADS // (heads // kv_heads))


class Decode:
    """What a step launches in each of its layers, found out once."""

    def __init__(
        self,
        queries: torch.Tensor,
        pool: Sides,
        slots: torch.Tensor,
        pages: torch.Tensor,
        contexts: torch.Tensor,
        page_size: int,
        *,
        longest: int,
        shared: SharedPrefixes | None = None,
    ) -> None:
        """For ``queries`` and a ``pool`` of one layer, and such as are like them; the rest as for ``decode``."""
        (rows, heads, dim), kv = queries.shape, pool[0].shape[1]
        device, block = queries.device, max(16, triton.next_power_of_2(dim))
        splits = splits_of(rows, kv, longest)
        places = splits if shared is None else splits + shared.most_parts
        self._parts = None
        if places > 1:
            parts = torch.empty((rows, heads, places, dim), dtype=torch.float32, device=device)
            self._parts = parts, torch.empty((rows, heads, places), dtype=torch.float32, device=device)
        self._shared, group = shared, heads // kv
        self._tables = slots, pages
        self._rows = contexts, contexts if shared is None else shared.skipped
        self._held = contexts if shared is None else shared.parts
        self._numbers = LOG2_E * dim**-0.5, pages.stride(0), splits, places
        early = launch_options(device)
        sizes: dict[str, Any] = {"KV": kv, "GROUP": group, "DIM": dim, "DIM_BLOCK": block, "PAGE": page_size}
        sizes["ASSEMBLY"] = has_assembly(device)
        if shared is not None:
            self._read_prefixes = Repeated(
                decode_attention.decode_prefixes,
                (kv, shared.items.shape[1], 1),
                FEW=max(FEW_HEADS, triton.next_power_of_2(group)),
                MANY=max(GROUP_HEADS, triton.next_power_of_2(group)),
                **sizes,
                **prefix_tiles(queries.dtype, block),
                **early,
            )
        self._read_rows = Repeated(
            decode_attention.decode_rows,
            (kv, splits, rows),
            GROUP_BLOCK=max(16, triton.next_power_of_2(group)),
            WHOLE=places == 1,
            SKIPS=shared is not None,
            **sizes,
            **decode_tiles(queries.dtype, pool[0].dtype, block, splits, rows),
            **early,
        )
        self._merge = Repeated(
            decode_attention.merge_parts,
            (rows * heads, 1, 1),
            HEADS=heads,
            DIM=dim,
            DIM_BLOCK=block,
            SPLITS_BLOCK=triton.next_power_of_2(places),
            SKIPS=shared is not None,
            num_warps=1,
            **early,
        )

    def __call__(self, queries: torch.Tensor, pool: Sides, output: torch.Tensor) -> None:
        """Attend with ``queries`` in a layer whose K and V are ``pool``; ``output`` has the shape of the former."""
        shared, parts = self._shared, self._parts or (output, output)
        if shared is not None:
            items = shared.order, shared.items
            room = shared.items.shape[1]
            self._read_prefixes(queries, *pool, *self._tables, *items, *parts, *self._numbers, room)
        self._read_rows(queries, *pool, *self._tables, *self._rows, output, *parts, *self._numbers)
        if self._parts is not None:
            self._merge(*parts, self._held, output, *self._numbers[2:])


def decode(
    queries: torch.Tensor,
    pool: Sides,
    slots: torch.Tensor,
    pages: torch.Tensor,
    contexts: torch.Tensor,
    page_size: int,
    *,
    longest: int,
    shared: SharedPrefixes | None = None,
) -> torch.Tensor:
    """One query a row: [R, heads, d] over the first ``contexts`` int32[R] tokens of ``slots`` [R]; same shape.

    ``pages`` int32[slots, P] is the page table, ``longest`` the most that any context will ever be. What is ``shared``
    is shorter than the contexts of its rows.
    """
    output = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    launch = Decode(queries, pool, slots, pages, contexts, page_size, longest=longest, shared=shared)
    launch(queries, pool, output)
    return output
