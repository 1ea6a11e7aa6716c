"""FlashInfer's prefill over the paged cache, by whole contexts and by divided ones, against float64."""

import numpy as np
import pytest
import torch
from kernel_device import TOLERANCE, error
from paged_contexts import PagedContexts, causal_attention

from skiff_runtime.attention.hybrid import LONG_CONTEXT as LONG
from skiff_runtime.attention.hybrid import HybridAttention, PrefillBySize
from skiff_runtime.attention.selector import make_backend
from skiff_runtime.kvcache.kv_pool import KVLayout, KVPool

pytestmark = pytest.mark.gpu

PAGE_SIZES = (1, 16, 64)
KV_HEADS, DIM, HEADS, DTYPE = 2, 128, 8, torch.bfloat16
DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    "starts, lengths",
    [([0, 17], [40, 130]), ([LONG + 5], [100]), ([3 * LONG, 0, 9], [129, 1, 300])],
    ids=["short", "long", "both"],
)
def test_prefill(starts: list[int], lengths: list[int], split: bool) -> None:
    """Over pages of any size; what takes whole contexts on Hopper gives the very same numbers for all of them.

    It reads K and V in tiles of tokens, wherever their pages are (FlashInfer's hopper/sparse_mainloop.cuh), and its plan
    knows tokens alone (PrefillSM90Plan). What divides contexts, does so between two pages (PrefillSplitQOKVIndptr).
    """
    from flashinfer.utils import determine_attention_backend

    from skiff_runtime.attention.flashinfer import FlashInferPrefill  # on GPU machines alone

    torch.manual_seed(len(starts))
    totals = np.add(starts, lengths).tolist()
    contexts = [torch.randn(2, total, KV_HEADS, DIM, dtype=DTYPE, device=DEVICE) for total in totals]
    q = torch.randn(sum(lengths), HEADS, DIM, dtype=DTYPE, device=DEVICE)
    parts = zip(torch.split(q, lengths), contexts, strict=True)
    wanted = [causal_attention(part, *context) for part, context in parts]
    in_tiles = determine_attention_backend(DEVICE, 0, False, False, DTYPE, DTYPE) == "fa3"
    alike = []
    for page_size in PAGE_SIZES:
        paged = PagedContexts(contexts, page_size)
        prefill = FlashInferPrefill(paged.pool, HEADS, split=split)
        prefill.prepare(paged.batch(starts, lengths))
        attended = torch.full_like(q, torch.nan)
        prefill.forward(0, q, attended)
        for found, expected in zip(torch.split(attended, lengths), wanted, strict=True):
            assert error(found, expected) < TOLERANCE[DTYPE], page_size
        if in_tiles and prefill._wrappers is prefill._whole:
            alike.append(attended)
    assert all(torch.equal(each, alike[0]) for each in alike)


@pytest.mark.parametrize(
    ("name", "small_prefill_tokens", "expected"),
    [("auto", 9, PrefillBySize), ("auto", 0, None), ("flashinfer,triton", 9, None)],
)
def test_few_tokens_of_a_small_model_are_ours(
    monkeypatch: pytest.MonkeyPatch, name: str, small_prefill_tokens: int, expected: type | None
) -> None:
    """Where FlashInfer's kernels are built, and nobody asked for them by name."""
    from skiff_runtime.attention import flashinfer  # on GPU machines alone

    monkeypatch.setattr(flashinfer, "is_prefill_built", lambda *_: True)
    pool = KVPool(KVLayout(1, KV_HEADS, DIM, 16, DTYPE), 1, DEVICE)
    backend = make_backend(
        name, pool, query_heads=HEADS, longest=LONG, small_prefill_tokens=small_prefill_tokens
    )
    assert isinstance(backend, HybridAttention)
    assert type(backend._prefill) is (expected or flashinfer.FlashInferPrefill)
