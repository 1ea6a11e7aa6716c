"""Contexts in shuffled pages of a cache, and attention over them in float64: for backends that are given whole batches."""

from collections.abc import Sequence

import numpy as np
import torch

from skiff_runtime.attention.base import AttentionBatch
from skiff_runtime.kvcache.kv_pool import KVLayout, KVPool


class PagedContexts:
    """K and V [2, tokens, kv_heads, d] of each row, in a pool of one layer whose other places are random numbers."""

    def __init__(self, contexts: Sequence[torch.Tensor], page_size: int) -> None:
        (_, _, kv_heads, dim), dtype, device = contexts[0].shape, contexts[0].dtype, contexts[0].device
        counts = [-(-context.shape[1] // page_size) for context in contexts]
        self.pool = KVPool(KVLayout(1, kv_heads, dim, page_size, dtype), sum(counts), device)
        order = torch.randperm(sum(counts), dtype=torch.int32, device=device)
        self.table = torch.full(
            (len(contexts), max(counts) + 3), self.pool.num_pages, dtype=torch.int32, device=device
        )
        within = torch.arange(page_size, device=device)
        for side in self.pool.tokens(0):
            side.normal_()
        for line, pages, context in zip(self.table, torch.split(order, counts), contexts, strict=True):
            line[: len(pages)] = pages
            places = (pages.long()[:, None] * page_size + within).flatten()[: context.shape[1]]
            for side, tokens in zip(self.pool.tokens(0), context, strict=True):
                side[places] = tokens

    def batch(self, starts: Sequence[int], lengths: Sequence[int], *, decode_rows: int = 0) -> AttentionBatch:
        """A step in which each row computes so many tokens after so many that are there."""
        host = [np.array(each, np.int32) for each in (range(len(starts)), starts, lengths)]
        firsts = np.cumsum(host[2], dtype=np.int32) - host[2]
        rows = torch.from_numpy(np.stack((*host, firsts))).to(self.table.device)
        contexts = rows[1] + rows[2]
        return AttentionBatch(host[1], host[2], decode_rows, rows, contexts, self.table, self.table)


def causal_attention(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """In float64: the last N of L tokens ask; q [N, heads, d], keys and values [L, kv_heads, d]."""
    ranks = q.shape[1] // keys.shape[1]
    wide_keys, wide_values = (each.double().repeat_interleave(ranks, 1) for each in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q.double(), wide_keys) * q.shape[2] ** -0.5
    seen = torch.ones(len(q), len(keys), dtype=torch.bool, device=q.device).tril(len(keys) - len(q))
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, wide_values)
