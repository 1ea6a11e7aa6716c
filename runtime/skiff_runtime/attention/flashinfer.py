"""FlashInfer's kernels: planned prefill over pages, and decode without a plan (XQA), which a CUDA graph can capture."""

from functools import cache
from typing import Final

import flashinfer
import numpy as np
import torch
from flashinfer.decode import xqa_batch_decode_with_kv_cache

from skiff_runtime.attention.base import AttentionBatch
from skiff_runtime.attention.hybrid import PhaseAttention
from skiff_runtime.kernels.flashinfer_internals import (
    determine_attention_backend,
    device_support_pdl,
    environment,
    get_batch_prefill_uri,
)
from skiff_runtime.kernels.kernel_cache import use_prebuilt_flashinfer_modules
from skiff_runtime.kernels.triton.prepare_inputs import gather_pages
from skiff_runtime.kernels.tuning import tuning_for
from skiff_runtime.kvcache.kv_pool import KVPool
from skiff_runtime.step import Int32

use_prebuilt_flashinfer_modules()
WORKSPACE_BYTES: Final = 256 << 20
DECODE_WORKSPACE_BYTES: Final = 128 << 20
PLANS_IN_FLIGHT: Final = 3
"""Each plan stages its uploads in pinned memory of its own, which must not change before they are done."""
SPLIT_KV_BACKEND: Final = "fa2"
"""FlashInfer's kernels that split a context over several programs; its default on Hopper (fa3) does not."""
TILE_TOKENS: Final = 128
"""Query tokens of a head that one program of fa3 computes: a chunk of 128 tokens takes as long as one of 16."""
HEAD_DIMS: Final = (64, 128, 256)
DECODE_PAGE_SIZES: Final = (16, 32, 64, 128)
DECODE_ARCHITECTURES: Final = (9, 10, 12)
DTYPES: Final = (torch.bfloat16, torch.float16)


def unsupported_reason(pool: KVPool, query_heads: int, *, decode: bool) -> str | None:
    """Explain why FlashInfer cannot compute prefill or decode over ``pool``; None if it can."""
    layout = pool.layout
    if layout.dtype not in DTYPES:
        return f"FlashInfer computes in bfloat16 or float16, not {layout.dtype}"
    if layout.head_dim not in HEAD_DIMS:
        return f"FlashInfer supports heads of {HEAD_DIMS} dimensions, not {layout.head_dim}"
    if not decode:
        return None
    if layout.page_size not in DECODE_PAGE_SIZES:
        return f"FlashInfer's decode supports pages of {DECODE_PAGE_SIZES} tokens, not {layout.page_size}"
    if query_heads // layout.kv_heads > 16:
        return "FlashInfer's decode supports at most 16 query heads per KV head"
    if torch.cuda.get_device_capability(pool.device)[0] not in DECODE_ARCHITECTURES:
        return "FlashInfer's decode needs compute capability 9, 10 or 12"
    return None


def is_prefill_built(pool: KVPool, backend: str | None = None) -> bool:
    """Return whether the prefill kernels have been compiled before; if not, the first start waits a minute for them.

    ``backend`` names one of FlashInfer's own backends; None stands for its default on this device.
    """
    dtype, dim = pool.layout.dtype, pool.layout.head_dim
    backend = backend or determine_attention_backend(pool.device, 0, False, False, dtype, dtype)
    parameters = (dtype, dtype, dtype, torch.int32, dim, dim)
    folders = (environment.FLASHINFER_AOT_DIR, environment.FLASHINFER_JIT_DIR)
    names = [
        get_batch_prefill_uri(backend, *parameters, 0, window is not None, False, False)
        for window in pool.layout.distinct_windows
    ]
    return all(any((folder / name / f"{name}.so").exists() for folder in folders) for name in names)


class FlashInferPrefill(PhaseAttention):
    """Prefill that is planned on the engine's thread while the GPU still computes the step before.

    A plan is for one sliding window, so a step is planned once for each that the model has.
    """

    def __init__(self, pool: KVPool, query_heads: int, *, split_kv: bool | None = None) -> None:
        """``split_kv`` allows kernels that split contexts, for few tokens after long ones (None: if they are built)."""
        self._pool = pool
        self._paged_kv = _paged_views(pool)
        self._enable_pdl = device_support_pdl(pool.device)
        self._query_heads = query_heads
        split_kv = is_prefill_built(pool, SPLIT_KV_BACKEND) if split_kv is None else split_kv
        windows = pool.layout.distinct_windows
        self._default = {window: _make_wrappers(pool.device, "auto") for window in windows}
        self._split_kv = self._default
        if split_kv:
            self._split_kv = {window: _make_wrappers(pool.device, SPLIT_KV_BACKEND) for window in windows}
        self._wrappers: dict[int | None, flashinfer.BatchPrefillWithPagedKVCacheWrapper] = {}
        self._num_sms = torch.cuda.get_device_properties(pool.device).multi_processor_count
        self._long_context = tuning_for(pool.device).prefill_choice.long_context
        self._planned: list[torch.cuda.Event | None] = [None] * PLANS_IN_FLIGHT
        self._turn = 0

    def prepare(self, batch: AttentionBatch) -> None:
        layout, first = self._pool.layout, batch.decode_rows
        lengths, seq_lens = batch.prefill_rows()
        pages = -(-seq_lens // layout.page_size)
        indptr = _to_pinned(_indptr(pages))
        self._turn = (self._turn + 1) % PLANS_IN_FLIGHT
        event = self._planned[self._turn]
        if event is not None:
            event.synchronize()  # the plan that last used this wrapper may still upload from its pinned memory
        indices = gather_pages(
            batch.page_table,
            batch.rows[0, first:],
            indptr.to(self._pool.device, non_blocking=True),
            total=int(pages.sum()),
        )
        query_indptr = _to_pinned(_indptr(lengths))
        last_page_lens = _to_pinned(seq_lens - (pages - 1) * layout.page_size)
        for window in layout.distinct_windows:
            is_idle = self._leaves_gpu_idle(lengths, seq_lens, window)
            wrappers = (self._split_kv if is_idle else self._default)[window]
            self._wrappers[window] = wrappers[self._turn]
            self._wrappers[window].plan(
                query_indptr,
                indptr,
                indices,
                last_page_lens,
                self._query_heads,
                layout.kv_heads,
                layout.head_dim,
                layout.page_size,
                causal=True,
                window_left=_window_left(window),
                q_data_type=layout.dtype,
                kv_data_type=layout.dtype,
            )
        planned = torch.cuda.Event()  # type: ignore[no-untyped-call]
        planned.record()
        self._planned[self._turn] = planned

    def forward(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        wrapper = self._wrappers[self._pool.layout.window(layer)]
        wrapper.run(q, self._paged_kv[layer], out=out, enable_pdl=self._enable_pdl)

    def _leaves_gpu_idle(self, lengths: Int32, seq_lens: Int32, window: int | None) -> bool:
        """Return whether one program per tile and head would fill less than half of the GPU, and for long."""
        programs = int((-(-lengths // TILE_TOKENS)).sum()) * self._query_heads
        longest = int(seq_lens.max())
        if window is not None:
            longest = min(longest, window + TILE_TOKENS)
        return 2 * programs <= self._num_sms and longest >= self._long_context


class FlashInferDecode(PhaseAttention):
    """XQA, which reads page tables and lengths on the device and so needs no plan."""

    needs_block_table = True

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._paged_kv = _paged_views(pool)
        self._workspace = _workspace(pool.device, DECODE_WORKSPACE_BYTES)
        self._scale = pool.layout.head_dim**-0.5
        self._batch: AttentionBatch | None = None

    def prepare(self, batch: AttentionBatch) -> None:
        self._batch = batch

    def forward(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        batch, rows = self._batch, q.shape[0]
        assert batch is not None and batch.block_table is not None
        table = batch.block_table[:rows]
        xqa_batch_decode_with_kv_cache(
            q,
            self._paged_kv[layer],
            self._workspace,
            table,
            batch.seq_lens[:rows].view(torch.uint32),
            table.shape[1] * self._pool.layout.page_size,
            bmm1_scale=self._scale,
            window_left=_window_left(self._pool.layout.window(layer)),
            kv_layout="NHD",
            out=out,
        )


def _window_left(window: int | None) -> int:
    """Return FlashInfer's form of a window: the tokens before the query's own, and -1 for full attention."""
    return -1 if window is None else window - 1


def _make_wrappers(
    device: torch.device, backend: str
) -> list[flashinfer.BatchPrefillWithPagedKVCacheWrapper]:
    workspace = _workspace(device, WORKSPACE_BYTES)
    return [
        flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend)
        for _ in range(PLANS_IN_FLIGHT)
    ]


@cache
def _workspace(device: torch.device, size: int) -> torch.Tensor:
    """Allocate one workspace for all pools of the process, zeroed because XQA keeps semaphores in it."""
    return torch.zeros(size, dtype=torch.uint8, device=device)


def _paged_views(pool: KVPool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """View K and V of each layer as [pages, page_size, kv_heads, d]."""
    layout = pool.layout
    shape = (-1, layout.page_size, layout.kv_heads, layout.head_dim)
    sides = (pool.layer_kv(layer) for layer in range(layout.layers))
    return [(k.view(shape), v.view(shape)) for k, v in sides]


def _indptr(counts: Int32) -> Int32:
    """Return the offsets of consecutive runs of ``counts`` elements, and the end of the last one (CSR's indptr)."""
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int32)


def _to_pinned(values: Int32) -> torch.Tensor:
    return torch.from_numpy(values).pin_memory()
