"""FlashInfer's decode without a plan (XQA) over the paged KV cache, against float64."""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import pytest
import torch
from kernel_device import TOLERANCE, error
from paged_contexts import PagedContexts, causal_attention

from skiff_runtime.attention.selector import make_backend
from skiff_runtime.errors import ConfigError
from skiff_runtime.kvcache.kv_pool import KVLayout, KVPool

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

KV_HEADS, DIM, DTYPE = 2, 128, torch.bfloat16
DEVICE = torch.device("cuda", 0)
MODULES: Final = [(16, 4), (128, 1), (32, 8), (64, 8)][: int(os.environ.get("SKIFF_TEST_XQA_MODULES", "2"))]
"""(Page size, query heads per KV head). nvcc compiles a module for each, so all are tested only if
SKIFF_TEST_XQA_MODULES says so; the first is that of the engine's tests."""
LENGTHS: Final = [1, 17, 256, 1000, 4097]


@pytest.fixture(scope="module", autouse=True)
def modules() -> None:
    """Compile all modules in parallel, which takes about as long as one."""
    from flashinfer.jit.xqa import gen_xqa_module  # only on GPU machines

    made = [gen_xqa_module(DTYPE, DTYPE, page_size, DIM, group, False, DTYPE) for page_size, group in MODULES]
    with ThreadPoolExecutor(len(made)) as pool:
        for built in [pool.submit(module.build, verbose=False) for module in made]:
            built.result()


@pytest.mark.parametrize("page_size, group", MODULES)
def test_xqa_decode_equals_reference(page_size: int, group: int) -> None:
    """Contexts have one token, one tile and many. XQA must leave its workspace's counters clean, so it runs again."""
    from skiff_runtime.attention.flashinfer import FlashInferDecode

    torch.manual_seed(page_size)
    contexts = [torch.randn(2, length, KV_HEADS, DIM, dtype=DTYPE, device=DEVICE) for length in LENGTHS]
    paged = PagedContexts(contexts, page_size)
    decode = FlashInferDecode(paged.pool)
    decode.prepare(
        paged.batch([length - 1 for length in LENGTHS], [1] * len(LENGTHS), decode_rows=len(LENGTHS))
    )
    for rows in (len(LENGTHS), 2, len(LENGTHS)):
        q = torch.randn(rows, KV_HEADS * group, DIM, dtype=DTYPE, device=DEVICE)
        attended = torch.full_like(q, torch.nan)
        decode.forward(0, q, attended)
        for row, context in enumerate(contexts[:rows]):
            one = slice(row, row + 1)
            assert error(attended[one], causal_attention(q[one], *context)) < 2 * TOLERANCE[DTYPE], LENGTHS[
                row
            ]


def test_xqa_decode_of_each_layer_has_its_window() -> None:
    """One more module is compiled, for all windows."""
    from skiff_runtime.attention.flashinfer import FlashInferDecode

    page_size, group = MODULES[0]
    torch.manual_seed(page_size)
    windows = (1, None, 17, 64, 1000, 5000)
    contexts = [torch.randn(2, length, KV_HEADS, DIM, dtype=DTYPE, device=DEVICE) for length in LENGTHS]
    paged = PagedContexts(contexts, page_size, windows=windows)
    decode = FlashInferDecode(paged.pool)
    decode.prepare(
        paged.batch([length - 1 for length in LENGTHS], [1] * len(LENGTHS), decode_rows=len(LENGTHS))
    )
    q = torch.randn(len(LENGTHS), KV_HEADS * group, DIM, dtype=DTYPE, device=DEVICE)
    for layer, window in enumerate(windows):
        attended = torch.full_like(q, torch.nan)
        decode.forward(layer, q, attended)
        for row, (keys, values) in enumerate(contexts):
            one = slice(row, row + 1)
            expected = causal_attention(q[one], keys, values, window)
            assert error(attended[one], expected) < 2 * TOLERANCE[DTYPE], (window, LENGTHS[row])


@pytest.mark.parametrize(
    "page_size, dtype, heads, reason",
    [(8, DTYPE, 8, "pages of"), (16, torch.float32, 8, "bfloat16 or float16"), (16, DTYPE, 34, "at most 16")],
    ids=str,
)
def test_unsupported_layout_is_refused(page_size: int, dtype: torch.dtype, heads: int, reason: str) -> None:
    """With a message, not by a failure to compile."""
    pool = KVPool(KVLayout(1, KV_HEADS, DIM, page_size, dtype), 1, DEVICE)
    with pytest.raises(ConfigError, match=reason):
        make_backend("triton,flashinfer", pool, query_heads=heads, max_model_len=512)
