"""FlashInfer's prefill over the paged KV cache, with whole and with split contexts, against float64."""

import numpy as np
import pytest
import torch
from kernel_device import TOLERANCE, error
from paged_contexts import PagedContexts, causal_attention

from skiff_runtime.attention.hybrid import HybridAttention, PrefillBySize
from skiff_runtime.attention.selector import make_backend
from skiff_runtime.kernels.tuning import DEFAULT
from skiff_runtime.kvcache.kv_pool import KVLayout, KVPool

pytestmark = pytest.mark.gpu

PAGE_SIZES = (1, 16, 64)
KV_HEADS, DIM, HEADS, DTYPE = 2, 128, 8, torch.bfloat16
DEVICE = torch.device("cuda", 0)
LONG = DEFAULT.prefill_choice.long_context


@pytest.mark.parametrize("split_kv", [False, True])
@pytest.mark.parametrize(
    "starts, lengths",
    [([0, 17], [40, 130]), ([LONG + 5], [100]), ([3 * LONG, 0, 9], [129, 1, 300])],
    ids=["short", "long", "both"],
)
def test_prefill_equals_reference_for_any_page_size(
    starts: list[int], lengths: list[int], split_kv: bool
) -> None:
    """On Hopper, the backend for whole contexts (fa3) computes identical numbers for all page sizes.

    It reads K and V in tiles of tokens, wherever their pages are (FlashInfer's hopper/sparse_mainloop.cuh), and its
    plan depends on tokens alone (PrefillSM90Plan). The backend that splits contexts does so between two pages
    (PrefillSplitQOKVIndptr).
    """
    from flashinfer.utils import determine_attention_backend

    from skiff_runtime.attention.flashinfer import FlashInferPrefill  # only on GPU machines

    torch.manual_seed(len(starts))
    totals = np.add(starts, lengths).tolist()
    contexts = [torch.randn(2, total, KV_HEADS, DIM, dtype=DTYPE, device=DEVICE) for total in totals]
    q = torch.randn(sum(lengths), HEADS, DIM, dtype=DTYPE, device=DEVICE)
    parts = zip(torch.split(q, lengths), contexts, strict=True)
    expected = [causal_attention(part, *context) for part, context in parts]
    is_fa3 = determine_attention_backend(DEVICE, 0, False, False, DTYPE, DTYPE) == "fa3"
    identical = []
    for page_size in PAGE_SIZES:
        paged = PagedContexts(contexts, page_size)
        prefill = FlashInferPrefill(paged.pool, HEADS, split_kv=split_kv)
        prefill.prepare(paged.batch(starts, lengths))
        attended = torch.full_like(q, torch.nan)
        prefill.forward(0, q, attended)
        for found, reference in zip(torch.split(attended, lengths), expected, strict=True):
            assert error(found, reference) < TOLERANCE[DTYPE], page_size
        if is_fa3 and prefill._wrappers[None] in prefill._default[None]:
            identical.append(attended)
    assert all(torch.equal(each, identical[0]) for each in identical)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("split_kv", [False, True])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_prefill_of_each_layer_has_its_window(page_size: int, split_kv: bool) -> None:
    """Windows of one token, shorter than a page, of whole tiles, and beyond every context, beside full attention."""
    from skiff_runtime.attention.flashinfer import FlashInferPrefill  # only on GPU machines

    torch.manual_seed(page_size)
    starts, lengths = [3 * LONG, 0, 9, LONG + 5], [129, 1, 300, 40]
    windows = (None, 1, 5, 128, 1000, LONG, 4 * LONG)
    totals = np.add(starts, lengths).tolist()
    contexts = [torch.randn(2, total, KV_HEADS, DIM, dtype=DTYPE, device=DEVICE) for total in totals]
    paged = PagedContexts(contexts, page_size, windows=windows)
    q = torch.randn(sum(lengths), HEADS, DIM, dtype=DTYPE, device=DEVICE)
    prefill = FlashInferPrefill(paged.pool, HEADS, split_kv=split_kv)
    for rows in (slice(None), slice(0, 1), slice(3, None)):  # one row alone leaves the GPU idle, and is split
        parts = torch.split(q, lengths)[rows]
        queries = torch.cat(parts)
        batch = paged.batch(starts[rows], lengths[rows], slots=range(len(starts))[rows])
        prefill.prepare(batch)
        for layer, window in enumerate(windows):
            attended = torch.full_like(queries, torch.nan)
            prefill.forward(layer, queries, attended)
            found = torch.split(attended, lengths[rows])
            for one, part, (keys, values) in zip(found, parts, contexts[rows], strict=True):
                expected = causal_attention(part, keys, values, window)
                assert error(one, expected) < TOLERANCE[DTYPE], (window, len(part))


@pytest.mark.parametrize(
    ("name", "small_prefill_tokens", "expected"),
    [("auto", 9, PrefillBySize), ("auto", 0, None), ("flashinfer,triton", 9, None)],
)
def test_auto_takes_our_kernel_for_small_prefill_steps(
    monkeypatch: pytest.MonkeyPatch, name: str, small_prefill_tokens: int, expected: type | None
) -> None:
    """FlashInfer's kernels are built, but not requested by name."""
    from skiff_runtime.attention import flashinfer  # only on GPU machines

    monkeypatch.setattr(flashinfer, "is_prefill_built", lambda *_: True)
    pool = KVPool(KVLayout(1, KV_HEADS, DIM, 16, DTYPE), 1, DEVICE)
    backend = make_backend(
        name, pool, query_heads=HEADS, max_model_len=LONG, small_prefill_tokens=small_prefill_tokens
    )
    assert isinstance(backend, HybridAttention)
    assert type(backend._prefill) is (expected or flashinfer.FlashInferPrefill)
