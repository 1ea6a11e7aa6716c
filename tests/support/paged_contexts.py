"""Contexts in shuffled pages of a KV cache, and reference attention over them in float64, for tests of backends."""

from collections.abc import Sequence

import numpy as np
import torch

from skiff_runtime.attention.base import AttentionBatch
from skiff_runtime.kvcache.kv_pool import KVLayout, KVPool


class PagedContexts:
    """K and V [2, tokens, kv_heads, d] of each row, in a pool of one layer that is filled with noise elsewhere."""

    def __init__(
        self, contexts: Sequence[torch.Tensor], page_size: int, *, windows: Sequence[int | None] = ()
    ) -> None:
        """``windows`` are those of the pool's layers, which hold the same contexts; one layer without a window if empty."""
        (_, _, kv_heads, dim), dtype, device = contexts[0].shape, contexts[0].dtype, contexts[0].device
        counts = [-(-context.shape[1] // page_size) for context in contexts]
        layers = len(windows) or 1
        layout = KVLayout(layers, kv_heads, dim, page_size, dtype, tuple(windows))
        self.pool = KVPool(layout, sum(counts), device)
        order = torch.randperm(sum(counts), dtype=torch.int32, device=device)
        self.table = torch.full(
            (len(contexts), max(counts) + 3), self.pool.num_pages, dtype=torch.int32, device=device
        )
        within = torch.arange(page_size, device=device)
        for side in self.pool.layer_kv(0):
            side.normal_()
        for line, pages, context in zip(self.table, torch.split(order, counts), contexts, strict=True):
            line[: len(pages)] = pages
            slot_mapping = (pages.long()[:, None] * page_size + within).flatten()[: context.shape[1]]
            for side, tokens in zip(self.pool.layer_kv(0), context, strict=True):
                side[slot_mapping] = tokens
        for layer in range(1, layers):
            for side, first in zip(self.pool.layer_kv(layer), self.pool.layer_kv(0), strict=True):
                side.copy_(first)

    def batch(
        self,
        starts: Sequence[int],
        lengths: Sequence[int],
        *,
        decode_rows: int = 0,
        slots: Sequence[int] | None = None,
    ) -> AttentionBatch:
        """Return a step in which row i computes ``lengths[i]`` tokens after ``starts[i]`` cached ones.

        Its context is number ``slots[i]``; i itself by default.
        """
        chosen = range(len(starts)) if slots is None else slots
        host = [np.array(each, np.int32) for each in (chosen, starts, lengths)]
        firsts = np.cumsum(host[2], dtype=np.int32) - host[2]
        rows = torch.from_numpy(np.stack((*host, firsts))).to(self.table.device)
        seq_lens = rows[1] + rows[2]
        return AttentionBatch(host[1], host[2], decode_rows, rows, seq_lens, self.table, self.table[rows[0]])


def causal_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int | None = None
) -> torch.Tensor:
    """Attend in float64 with the last N of L tokens: q [N, heads, d], keys and values [L, kv_heads, d].

    With a ``window``, the token at position i attends to the tokens j with i - window < j <= i.
    """
    group_size = q.shape[1] // keys.shape[1]
    wide_keys, wide_values = (each.double().repeat_interleave(group_size, 1) for each in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q.double(), wide_keys) * q.shape[2] ** -0.5
    visible = torch.ones(len(q), len(keys), dtype=torch.bool, device=q.device).tril(len(keys) - len(q))
    if window is not None:
        visible = visible.triu(len(keys) - len(q) - window + 1)
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, wide_values)
