"""Attention of one token a row: how its kernels are launched."""

from typing import Any, Final

import torch
import triton

from skiff_runtime.kernels.shared_prefixes import SharedPrefixes, max_prefix_splits
from skiff_runtime.kernels.triton.attention import decode_attention
from skiff_runtime.kernels.triton.attention.attend import FEW_QUERIES
from skiff_runtime.kernels.triton.attention.softmax import LOG2_E
from skiff_runtime.kernels.triton.attention.tiles import (
    decode_attention_tile,
    padded_head_dim,
    shared_prefix_tile,
)
from skiff_runtime.kernels.triton.fp8.dequantize import supports_fp8_ptx
from skiff_runtime.kernels.triton.runtime.cached_launch import CachedLaunch, LayerKV
from skiff_runtime.kernels.triton.runtime.dependent_launch import pdl_options

PROGRAMS: Final = 700
"""Decode makes about so many programs at least, which is enough where rows with long contexts come first."""
MAX_SPLITS: Final = 64
MIN_SPLIT: Final = 256
"""Tokens of the longest context for which another split pays."""
GROUP_HEADS: Final = 64
"""Query heads that read a prefix together, at most, as one tile of the tensor cores."""
FEW_HEADS: Final = 16
"""So few of them take a smaller tile."""


def choose_num_splits(rows: int, kv_heads: int, longest: int) -> int:
    """Into how many parts each row is cut: by what is known before the contexts are."""
    wanted = round(PROGRAMS / (rows * kv_heads))
    return max(1, min(wanted, MAX_SPLITS, -(-longest // MIN_SPLIT)))


def find_row_counts_by_variant(
    limit: int,
    kv_heads: int,
    longest: int,
    dtype: torch.dtype,
    cached: torch.dtype,
    dim: int,
    *,
    shared: bool = False,
) -> list[int]:
    """The least number of rows, of up to ``limit``, for each set of kernels that steps launch, with ``shared`` prefixes or none."""
    found: dict[tuple[Any, ...], int] = {}
    for rows in range(2 if shared else 1, limit + 1):
        splits = choose_num_splits(rows, kv_heads, longest)
        tiles = decode_attention_tile(dtype, cached, padded_head_dim(dim), splits, rows)
        places = splits + max_prefix_splits(rows) if shared else splits
        found.setdefault((triton.next_power_of_2(places), *tiles.values()), rows)
    return list(found.values())


def max_group_rows(heads: int, kv_heads: int) -> int:
    """How many rows read a prefix together."""
    return max(1, GROUP_HEADS // (heads // kv_heads))


class Decode:
    """What a step launches in each of its layers, found out once."""

    def __init__(
        self,
        queries: torch.Tensor,
        pool: LayerKV,
        slots: torch.Tensor,
        pages: torch.Tensor,
        contexts: torch.Tensor,
        page_size: int,
        *,
        longest: int,
        shared: SharedPrefixes | None = None,
    ) -> None:
        """For ``queries`` [R, heads, d] and a ``pool`` of one layer, and such as are like them.

        Row i attends to the first ``contexts[i]`` tokens of ``slots[i]``, both int32[R]; ``pages`` int32[slots, P] is the page
        table, ``longest`` the most that any context will ever be. What is ``shared`` is shorter than the contexts of
        its rows.
        """
        (rows, heads, dim), kv = queries.shape, pool[0].shape[1]
        block, group = padded_head_dim(dim), heads // kv
        splits = choose_num_splits(rows, kv, longest)
        places = splits if shared is None else splits + shared.max_prefix_splits
        self._shared, self._places = shared, places
        self._tables = slots, pages
        self._rows = contexts, contexts if shared is None else shared.skipped
        self._held = contexts if shared is None else shared.parts
        numbers = LOG2_E * dim**-0.5, pages.stride(0), splits, places
        early = pdl_options(queries.device)
        sizes: dict[str, Any] = {"KV": kv, "GROUP": group, "DIM": dim, "DIM_BLOCK": block, "PAGE": page_size}
        sizes["USE_PTX"] = supports_fp8_ptx(queries.device)
        if shared is not None:
            room = shared.items.shape[1]
            self._read_prefixes = CachedLaunch(
                decode_attention.shared_prefix_attention_kernel,
                (kv, room, 1),
                *(*numbers, room),
                FEW=max(FEW_HEADS, triton.next_power_of_2(group)),
                MANY=max(GROUP_HEADS, triton.next_power_of_2(group)),
                **sizes,
                **shared_prefix_tile(queries.dtype, block),
                **early,
            )
        self._read_rows = CachedLaunch(
            decode_attention.decode_rows,
            (kv, splits, rows),
            *numbers,
            GROUP_BLOCK=max(FEW_QUERIES.value, triton.next_power_of_2(group)),
            WHOLE=places == 1,
            SKIPS=shared is not None,
            **sizes,
            **decode_attention_tile(queries.dtype, pool[0].dtype, block, splits, rows),
            **early,
        )
        if places > 1:
            self._merge = CachedLaunch(
                decode_attention.merge_splits_kernel,
                (rows * heads, 1, 1),
                *(splits, places),
                HEADS=heads,
                DIM=dim,
                DIM_BLOCK=block,
                SPLITS_BLOCK=triton.next_power_of_2(places),
                SKIPS=shared is not None,
                num_warps=1,
                **early,
            )

    def __call__(self, queries: torch.Tensor, pool: LayerKV, output: torch.Tensor) -> None:
        """Attend with ``queries`` in a layer whose K and V are ``pool``; ``output`` has the shape of the former."""
        if self._places == 1:
            self._read_rows(queries, *pool, *self._tables, *self._rows, output, output, output)
            return
        (rows, heads, dim), device = queries.shape, queries.device
        parts = torch.empty((rows, heads, self._places, dim), dtype=torch.float32, device=device)
        weights = torch.empty((rows, heads, self._places), dtype=torch.float32, device=device)
        shared = self._shared
        if shared is not None:
            self._read_prefixes(queries, *pool, *self._tables, shared.order, shared.items, parts, weights)
        self._read_rows(queries, *pool, *self._tables, *self._rows, output, parts, weights)
        self._merge(parts, weights, self._held, output)
