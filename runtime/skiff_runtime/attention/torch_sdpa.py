"""Attention by PyTorch's scaled_dot_product_attention: the reference on any device, and the backend of CPUs.

Rows that compute one token are batched by similar context length; longer rows are computed one by one. Both gather
their K and V from the pages first. Layers with the same sliding window share these steps; with a window, only its
tokens are gathered.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from skiff_runtime.attention.base import AttentionBackend, AttentionBatch
from skiff_runtime.attention.workspace import GATHER_WORKSPACE_BYTES
from skiff_runtime.kvcache.kv_pool import KVPool

HostInts = NDArray[np.signedinteger]

MIN_BUCKET: Final = 256
"""Contexts of up to this many tokens are padded to one length."""
MAX_SCORES: Final = 1 << 21
"""Elements of one causal mask."""
MIN_WINDOW_BLOCK: Final = 128
"""Queries that are computed together in a layer with a shorter window than this."""


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """N rows of one token each, over what they see of their contexts, padded to L tokens.

    ``queries`` int64[N] are the indices of their tokens, ``slot_mapping`` int64[N * L] the KV offsets of the tokens
    that they see, and ``mask`` bool[N, 1, 1, L] is set where these are not padding.
    """

    queries: torch.Tensor
    slot_mapping: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One row of ``length`` tokens, the first of which has index ``first``, after ``start`` cached tokens that it sees.

    ``slot_mapping`` int64[start + length] are the KV offsets of these and its own. A token attends to the last
    ``window`` tokens up to itself, to all of them with None.
    """

    first: int
    length: int
    start: int
    slot_mapping: torch.Tensor
    window: int | None


@dataclass(frozen=True, slots=True)
class _Plan:
    """All rows of a step, for layers with the same window."""

    groups: list[_DecodeGroup]
    chunks: list[_Chunk]


class TorchSDPABackend(AttentionBackend):
    """Gathers K and V from the pages, and attends by PyTorch's own kernels."""

    def __init__(self, pool: KVPool) -> None:
        super().__init__(pool)
        self._offsets = torch.arange(pool.layout.page_size, device=pool.device)
        self._plans: dict[int | None, _Plan] = {}

    def prepare(self, batch: AttentionBatch) -> None:
        """Split the rows into groups and chunks for each window, and look up the KV offsets of what they see."""
        self._plans = {window: self._plan(batch, window) for window in self.pool.layout.distinct_windows}

    def forward(self, layer: int, q: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Attend group by group and chunk by chunk."""
        kv, plan = self.pool.layer_kv(layer), self._plans[self.pool.layout.window(layer)]
        out = torch.empty_like(q) if out is None else out
        for group in plan.groups:
            out.index_copy_(0, group.queries, _attend_group(group, q, kv))
        for chunk in plan.chunks:
            tokens = slice(chunk.first, chunk.first + chunk.length)
            keys, values = (side.index_select(0, chunk.slot_mapping).to(q.dtype) for side in kv)
            _attend_chunk(chunk, q[tokens], keys, values, out[tokens])
        return out

    def _plan(self, batch: AttentionBatch, window: int | None) -> _Plan:
        firsts = np.cumsum(batch.lengths) - batch.lengths
        single = np.flatnonzero(batch.lengths == 1)
        seq_lens = batch.starts[single] + 1
        hidden = np.zeros_like(seq_lens) if window is None else np.maximum(seq_lens - window, 0)
        layout = self.pool.layout
        max_tokens = GATHER_WORKSPACE_BYTES // (
            2 * layout.kv_heads * layout.head_dim * torch.float32.itemsize
        )
        groups = [
            self._make_group(
                batch, single[members], firsts[single[members]], (hidden[members], seq_lens[members])
            )
            for members in _group_by_length(seq_lens - hidden, max_tokens)
        ]
        long = np.flatnonzero(batch.lengths > 1)
        return _Plan(groups, [self._make_chunk(batch, int(row), int(firsts[row]), window) for row in long])

    def _make_group(
        self, batch: AttentionBatch, rows: HostInts, firsts: HostInts, seen: tuple[HostInts, HostInts]
    ) -> _DecodeGroup:
        """Group rows that see their tokens from ``seen[0]`` to ``seen[1]``, int[N] each."""
        device = self.pool.device
        numbers = np.stack((rows, firsts, seen[0], seen[1] - seen[0]))
        host = torch.from_numpy(numbers.astype(np.int64)).to(device)
        offsets = self._slot_mapping(
            batch, batch.rows[0, host[0]], host[2] if seen[0].any() else None, int(numbers[3].max())
        )
        valid = torch.arange(offsets.shape[1], device=device) < host[3][:, None]
        # Offsets beyond a context would read pages of other rows, where a NaN would pass the mask: 0 * NaN is NaN.
        slot_mapping = offsets.masked_fill(~valid, self.pool.padding_offset)
        return _DecodeGroup(host[1], slot_mapping.flatten(), valid[:, None, None, :])

    def _make_chunk(self, batch: AttentionBatch, row: int, first: int, window: int | None) -> _Chunk:
        start, length = int(batch.starts[row]), int(batch.lengths[row])
        hidden = 0 if window is None else max(start - window + 1, 0)
        begin = torch.tensor([hidden], device=self.pool.device) if hidden else None
        offsets = self._slot_mapping(batch, batch.rows[0, row : row + 1], begin, start + length - hidden)
        return _Chunk(first, length, start - hidden, offsets[0], window)

    def _slot_mapping(
        self, batch: AttentionBatch, slots: torch.Tensor, begins: torch.Tensor | None, count: int
    ) -> torch.Tensor:
        """Return the KV offsets int64[N, count] of tokens of ``slots`` [N], from ``begins`` int64[N] on (None: from 0)."""
        page_size = self.pool.layout.page_size
        if begins is None:
            pages = batch.page_table[slots, : -(-count // page_size)].long()
            return (pages[:, :, None] * page_size + self._offsets).flatten(1)[:, :count]
        tokens = begins[:, None] + torch.arange(count, device=self.pool.device)
        # Rows that end before others have no page there; what is looked up instead is padding.
        columns = (tokens // page_size).clamp(max=batch.page_table.shape[1] - 1)
        return batch.page_table[slots[:, None], columns].long() * page_size + tokens % page_size


def _group_by_length(seq_lens: HostInts, max_tokens: int) -> list[HostInts]:
    """Return groups of indices whose lengths differ by at most a factor of two.

    A group padded to its longest member has at most ``max_tokens`` tokens, unless it has a single member.
    """
    groups: list[HostInts] = []
    buckets = np.ceil(np.log2(np.maximum(seq_lens, MIN_BUCKET)))
    for bucket in np.unique(buckets):
        members = np.flatnonzero(buckets == bucket)
        size = max(1, max_tokens // int(seq_lens[members].max()))
        groups += [members[at : at + size] for at in range(0, len(members), size)]
    return groups


def _attend_group(
    group: _DecodeGroup, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Attend with one query per row; the query heads of one KV head take the dimension of query positions."""
    rows = group.mask.shape[0]
    kv_heads, head_dim = kv[0].shape[1:]
    queries = q.index_select(0, group.queries).view(rows, kv_heads, -1, head_dim)
    keys, values = (
        side.index_select(0, group.slot_mapping)
        .to(q.dtype)
        .view(rows, -1, kv_heads, head_dim)
        .transpose(1, 2)
        for side in kv
    )
    attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=group.mask)
    return attended.reshape(rows, -1, head_dim)


def _attend_chunk(
    chunk: _Chunk, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor
) -> None:
    """Attend causally with q [length, heads, d] over keys and values [start + length, kv_heads, d], block by block."""
    kv_heads, head_dim = keys.shape[1:]
    grouped = q.view(chunk.length, kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    group_size = grouped.shape[1]
    context = chunk.start + chunk.length
    columns = torch.arange(context, device=q.device)
    step = _choose_step(context, chunk.window)
    for begin in range(0, chunk.length, step):
        end = min(begin + step, chunk.length)
        visible = chunk.start + end
        hidden = 0 if chunk.window is None else max(chunk.start + begin - chunk.window + 1, 0)
        is_square = visible == end - begin and (chunk.window is None or visible <= chunk.window)
        mask = None  # if the block is square, the kernel's own causal mask is the right one
        if not is_square:
            queries, seen = columns[chunk.start + begin : visible, None], columns[hidden:visible]
            mask = seen <= queries
            if chunk.window is not None:
                mask &= seen > queries - chunk.window
        attended = F.scaled_dot_product_attention(
            grouped[:, :, begin:end],
            _expand_heads(keys[hidden:visible], group_size),
            _expand_heads(values[hidden:visible], group_size),
            attn_mask=mask,
            is_causal=is_square,
        )
        out[begin:end] = attended.permute(2, 0, 1, 3).flatten(1, 2)


def _choose_step(context: int, window: int | None) -> int:
    """Return the number of queries of a block: as many as ``MAX_SCORES`` allows, but no more than about the window.

    A block of queries reads the windows of all of them. With as many queries as tokens in a window, that is twice the
    window, however long the context is.
    """
    if window is None:
        return max(1, MAX_SCORES // context)
    step = max(window, MIN_WINDOW_BLOCK)
    return max(1, min(step, MAX_SCORES // min(context, window + step)))


def _expand_heads(side: torch.Tensor, group_size: int) -> torch.Tensor:
    """View [L, kv_heads, d] as [kv_heads, group_size, L, d], without a copy."""
    return side.transpose(0, 1)[:, None].expand(-1, group_size, -1, -1)
