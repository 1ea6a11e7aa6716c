"""FlashInfer's prefill over the paged cache, by whole contexts and by divided ones, against float64."""

import numpy as np
import pytest
import torch
from kernel_device import TOLERANCE, error

from skiff_runtime.attention.base import AttentionBatch
from skiff_runtime.attention.hybrid import LONG_CONTEXT as LONG
from skiff_runtime.attention.hybrid import HybridAttention, PrefillBySize
from skiff_runtime.attention.registry import make_backend
from skiff_runtime.kvcache.pool import KVLayout, KVPool

pytestmark = pytest.mark.gpu

PAGE, KV_HEADS, DIM, HEADS = 16, 2, 128, 8
DEVICE = torch.device("cuda", 0)


def pool_of(pages: int) -> KVPool:
    pool = KVPool(KVLayout(1, KV_HEADS, DIM, PAGE, torch.bfloat16), pages, DEVICE)
    for side in pool.tokens(0):
        side.normal_()
    return pool


def batch_of(starts: list[int], lengths: list[int], table: torch.Tensor) -> AttentionBatch:
    host = [np.array(each, np.int32) for each in (range(len(starts)), starts, lengths)]
    firsts = np.cumsum(host[2], dtype=np.int32) - host[2]
    rows = torch.from_numpy(np.stack((*host, firsts))).to(DEVICE)
    return AttentionBatch(host[1], host[2], 0, rows, rows[1] + rows[2], table)


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention in float64: the last len(q) of len(k) tokens ask."""
    k, v = (each.double().repeat_interleave(HEADS // KV_HEADS, 1) for each in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * DIM**-0.5
    hidden = torch.ones(len(q), len(k), dtype=torch.bool, device=DEVICE).tril(len(k) - len(q))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~hidden, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    "starts, lengths",
    [([0, 17], [40, 130]), ([LONG + 5], [100]), ([3 * LONG, 0, 9], [129, 1, 300])],
    ids=["short", "long", "both"],
)
def test_prefill(starts: list[int], lengths: list[int], split: bool) -> None:
    from skiff_runtime.attention.flashinfer import FlashInferPrefill  # on GPU machines alone

    torch.manual_seed(len(starts))
    counts = [-(-(start + length) // PAGE) for start, length in zip(starts, lengths, strict=True)]
    pool = pool_of(sum(counts))
    order = torch.randperm(sum(counts), dtype=torch.int32, device=DEVICE)
    table = torch.full((len(starts), max(counts)), pool.num_pages, dtype=torch.int32, device=DEVICE)
    for row, pages in enumerate(torch.split(order, counts)):
        table[row, : len(pages)] = pages
    prefill = FlashInferPrefill(pool, HEADS, split=split)
    prefill.prepare(batch_of(starts, lengths, table))
    q = torch.randn(sum(lengths), HEADS, DIM, dtype=torch.bfloat16, device=DEVICE)
    attended = torch.full_like(q, torch.nan)
    prefill.forward(0, q, attended)
    places = torch.arange(PAGE, device=DEVICE)
    for row, (part, found) in enumerate(
        zip(torch.split(q, lengths), torch.split(attended, lengths), strict=True)
    ):
        cells = (table[row, : counts[row]].long()[:, None] * PAGE + places).flatten()
        k, v = (side[cells[: starts[row] + lengths[row]]] for side in pool.tokens(0))
        assert error(found, reference(part, k, v)) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize(
    ("name", "few_tokens", "expected"),
    [("auto", 9, PrefillBySize), ("auto", 0, None), ("flashinfer,triton", 9, None)],
)
def test_few_tokens_of_a_small_model_are_ours(
    monkeypatch: pytest.MonkeyPatch, name: str, few_tokens: int, expected: type | None
) -> None:
    """Where FlashInfer's kernels are built, and nobody asked for them by name."""
    from skiff_runtime.attention import flashinfer  # on GPU machines alone

    monkeypatch.setattr(flashinfer, "prefill_is_built", lambda *_: True)
    backend = make_backend(name, pool_of(1), query_heads=HEADS, longest=LONG, few_tokens=few_tokens)
    assert isinstance(backend, HybridAttention)
    assert type(backend._prefill) is (expected or flashinfer.FlashInferPrefill)
