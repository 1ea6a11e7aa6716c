"""Attention in plain PyTorch: the reference on any device, and the backend of CPUs.

Rows that compute one token are batched by similar context length; longer rows go one by
one. Both gather their K and V from the pages and call scaled_dot_product_attention.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from skiff_runtime.attention.base import AttentionBackend, AttentionBatch
from skiff_runtime.kvcache.kv_pool import KVPool
from skiff_runtime.models.footprint import DTYPE_BYTES, GATHER_WORKSPACE_BYTES

HostInts = NDArray[np.signedinteger]

MIN_BUCKET: Final = 256
"""Contexts up to this many tokens are padded to one length."""
MAX_SCORES: Final = 1 << 21
"""Elements of one causal mask."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows of one token each: places of their queries [N], of K and V [N * L], and which of these count."""

    queries: torch.Tensor
    slot_mapping: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A row of ``length`` tokens from query ``first`` on, after ``start`` cached ones; places of all its K and V."""

    first: int
    length: int
    start: int
    slot_mapping: torch.Tensor


class TorchSDPABackend(AttentionBackend):
    """Gathers pages and uses PyTorch's own attention."""

    def __init__(self, pool: KVPool) -> None:
        super().__init__(pool)
        self._offsets = torch.arange(pool.layout.page_size, device=pool.device)
        self._groups: list[_Group] = []
        self._chunks: list[_Chunk] = []

    def prepare(self, batch: AttentionBatch) -> None:
        """Split the rows into groups and chunks, and look up where their K and V are."""
        firsts = np.cumsum(batch.lengths) - batch.lengths
        single = np.flatnonzero(batch.lengths == 1)
        contexts = batch.starts[single] + 1
        layout = self.pool.layout
        most = GATHER_WORKSPACE_BYTES // (2 * layout.kv_heads * layout.head_dim * DTYPE_BYTES["float32"])
        self._groups = [
            self._group(batch, single[members], firsts[single[members]], contexts[members])
            for members in _similar(contexts, most)
        ]
        self._chunks = [
            self._chunk(batch, int(row), int(firsts[row])) for row in np.flatnonzero(batch.lengths > 1)
        ]

    def forward(self, layer: int, q: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        """Attend group by group and chunk by chunk."""
        pool = self.pool.tokens(layer)
        output = torch.empty_like(q) if into is None else into
        for group in self._groups:
            output.index_copy_(0, group.queries, _attend_group(group, q, pool))
        for chunk in self._chunks:
            place = slice(chunk.first, chunk.first + chunk.length)
            keys, values = (side.index_select(0, chunk.slot_mapping).to(q.dtype) for side in pool)
            _attend_chunk(chunk, q[place], keys, values, output[place])
        return output

    def _group(self, batch: AttentionBatch, rows: HostInts, firsts: HostInts, contexts: HostInts) -> _Group:
        device = self.pool.device
        host = torch.from_numpy(np.stack((rows, firsts, contexts)).astype(np.int64)).to(device)
        places = self._places(batch, batch.rows[0, host[0]], int(contexts.max()))
        valid = torch.arange(places.shape[1], device=device) < host[2][:, None]
        slot_mapping = places.masked_fill(~valid, self.pool.padding_slot_mapping)
        return _Group(host[1], slot_mapping.flatten(), valid[:, None, None, :])

    def _chunk(self, batch: AttentionBatch, row: int, first: int) -> _Chunk:
        start, length = int(batch.starts[row]), int(batch.lengths[row])
        places = self._places(batch, batch.rows[0, row : row + 1], start + length)
        return _Chunk(first, length, start, places[0])

    def _places(self, batch: AttentionBatch, slots: torch.Tensor, context: int) -> torch.Tensor:
        """Token places [N, context] of the first ``context`` tokens of ``slots`` [N]."""
        page_size = self.pool.layout.page_size
        pages = batch.page_table[slots, : -(-context // page_size)].long()
        return (pages[:, :, None] * page_size + self._offsets).flatten(1)[:, :context]


def _similar(contexts: HostInts, room: int) -> list[HostInts]:
    """Indices of contexts, in groups whose lengths differ by at most a factor of two and that fill at most ``room`` places.

    A context that is longer is alone.
    """
    groups: list[HostInts] = []
    buckets = np.ceil(np.log2(np.maximum(contexts, MIN_BUCKET)))
    for bucket in np.unique(buckets):
        members = np.flatnonzero(buckets == bucket)
        most = max(1, room // int(contexts[members].max()))
        groups += [members[at : at + most] for at in range(0, len(members), most)]
    return groups


def _attend_group(group: _Group, q: torch.Tensor, pool: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """One query per row; the query heads of one KV head stand where a sequence of queries would."""
    rows = group.mask.shape[0]
    kv_heads, head_dim = pool[0].shape[1:]
    queries = q.index_select(0, group.queries).view(rows, kv_heads, -1, head_dim)
    keys, values = (
        side.index_select(0, group.slot_mapping)
        .to(q.dtype)
        .view(rows, -1, kv_heads, head_dim)
        .transpose(1, 2)
        for side in pool
    )
    mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=group.mask)
    return mixed.reshape(rows, -1, head_dim)


def _attend_chunk(
    chunk: _Chunk, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, output: torch.Tensor
) -> None:
    """Causal attention of q [length, heads, d] over keys and values [start + length, kv_heads, d], in blocks."""
    kv_heads, head_dim = keys.shape[1:]
    grouped = q.view(chunk.length, kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    ranks = grouped.shape[1]
    context = chunk.start + chunk.length
    columns = torch.arange(context, device=q.device)
    step = max(1, MAX_SCORES // context)
    for begin in range(0, chunk.length, step):
        end = min(begin + step, chunk.length)
        seen = chunk.start + end
        square = seen == end - begin
        mask = None if square else columns[:seen] <= columns[chunk.start + begin : seen, None]
        mixed = F.scaled_dot_product_attention(
            grouped[:, :, begin:end],
            _spread(keys[:seen], ranks),
            _spread(values[:seen], ranks),
            attn_mask=mask,
            is_causal=square,
        )
        output[begin:end] = mixed.permute(2, 0, 1, 3).flatten(1, 2)


def _spread(side: torch.Tensor, ranks: int) -> torch.Tensor:
    """[L, kv_heads, d] -> [kv_heads, ranks, L, d] without a copy."""
    return side.transpose(0, 1)[:, None].expand(-1, ranks, -1, -1)
