"""FlashInfer's kernels: planned prefill over pages, and decode without a plan (XQA), which a CUDA graph can hold."""

from functools import cache
from typing import Final

import flashinfer
import numpy as np
import torch
from flashinfer.decode import xqa_batch_decode_with_kv_cache

from skiff_runtime.attention.base import AttentionBatch
from skiff_runtime.attention.hybrid import LONG_CONTEXT, Part
from skiff_runtime.kernels.flashinfer_internals import (
    determine_attention_backend,
    device_support_pdl,
    environment,
    get_batch_prefill_uri,
)
from skiff_runtime.kernels.kernel_cache import use_prebuilt_flashinfer_modules
from skiff_runtime.kernels.triton.step_inputs import gather_pages
from skiff_runtime.kvcache.kv_pool import KVPool
from skiff_runtime.step import Int32

use_prebuilt_flashinfer_modules()
WORKSPACE_BYTES: Final = 256 << 20
DECODE_WORKSPACE_BYTES: Final = 128 << 20
PLANS: Final = 3
"""Plans that may be in flight: each stages what it uploads in pinned memory of its own."""
SPLITTING: Final = "fa2"
"""FlashInfer's kernels that divide a context between programs; those of its choice on Hopper (fa3) do not."""
TILE_TOKENS: Final = 128
"""What one program of these computes: a chunk of 128 tokens takes them as long as one of 16."""
HEAD_DIMS: Final = (64, 128, 256)
DECODE_PAGE_SIZES: Final = (16, 32, 64, 128)
DECODE_ARCHITECTURES: Final = (9, 10, 12)
TYPES: Final = (torch.bfloat16, torch.float16)


def unsupported_reason(pool: KVPool, query_heads: int, *, decode: bool) -> str | None:
    """Why FlashInfer cannot attend over ``pool`` in prefill or decode; None where it can."""
    layout = pool.layout
    if layout.dtype not in TYPES:
        return f"FlashInfer computes in bfloat16 or float16, not {layout.dtype}"
    if layout.head_dim not in HEAD_DIMS:
        return f"FlashInfer takes heads of {HEAD_DIMS} dimensions, not {layout.head_dim}"
    if not decode:
        return None
    if layout.page_size not in DECODE_PAGE_SIZES:
        return f"FlashInfer's decode takes pages of {DECODE_PAGE_SIZES} tokens, not {layout.page_size}"
    if query_heads // layout.kv_heads > 16:
        return "FlashInfer's decode takes at most 16 query heads for each KV head"
    if torch.cuda.get_device_capability(pool.device)[0] not in DECODE_ARCHITECTURES:
        return "FlashInfer's decode needs compute capability 9, 10 or 12"
    return None


def is_prefill_built(pool: KVPool, backend: str | None = None) -> bool:
    """Whether the kernels that prefill takes were compiled before; else the first start waits a minute for them.

    Those of FlashInfer's choice for the device, unless ``backend`` names others of its own.
    """
    dtype, dim = pool.layout.dtype, pool.layout.head_dim
    backend = backend or determine_attention_backend(pool.device, 0, False, False, dtype, dtype)
    kinds = (dtype, dtype, dtype, torch.int32, dim, dim)
    name = get_batch_prefill_uri(backend, *kinds, 0, False, False, False)
    folders = (environment.FLASHINFER_AOT_DIR, environment.FLASHINFER_JIT_DIR)
    return any((folder / name / f"{name}.so").exists() for folder in folders)


class FlashInferPrefill(Part):
    """Plans on the engine's thread, while the GPU still computes the step before."""

    def __init__(self, pool: KVPool, query_heads: int, *, split: bool | None = None) -> None:
        """``split``: a few tokens after long contexts are for kernels that divide a context (None: where built)."""
        self._pool = pool
        self._layers = _paged(pool)
        self._early = device_support_pdl(pool.device)
        self._query_heads = query_heads
        self._whole = _wrappers(pool.device, "auto")
        split = is_prefill_built(pool, SPLITTING) if split is None else split
        self._split = _wrappers(pool.device, SPLITTING) if split else self._whole
        self._wrappers = self._whole
        self._processors = torch.cuda.get_device_properties(pool.device).multi_processor_count
        self._planned: list[torch.cuda.Event | None] = [None] * PLANS
        self._turn = 0

    def prepare(self, batch: AttentionBatch) -> None:
        layout, first = self._pool.layout, batch.decode_rows
        lengths, contexts = batch.chunks()
        pages = -(-contexts // layout.page_size)
        self._wrappers = self._split if self._leaves_idle(lengths, contexts) else self._whole
        indptr = _pinned(_indptr(pages))
        self._turn = (self._turn + 1) % PLANS
        event = self._planned[self._turn]
        if event is not None:
            event.synchronize()
        indices = gather_pages(
            batch.page_table,
            batch.rows[0, first:],
            indptr.to(self._pool.device, non_blocking=True),
            total=int(pages.sum()),
        )
        self._wrappers[self._turn].plan(
            _pinned(_indptr(lengths)),
            indptr,
            indices,
            _pinned(contexts - (pages - 1) * layout.page_size),
            self._query_heads,
            layout.kv_heads,
            layout.head_dim,
            layout.page_size,
            causal=True,
            q_data_type=layout.dtype,
            kv_data_type=layout.dtype,
        )
        planned = torch.cuda.Event()  # type: ignore[no-untyped-call]
        planned.record()
        self._planned[self._turn] = planned

    def forward(self, layer: int, q: torch.Tensor, into: torch.Tensor) -> None:
        self._wrappers[self._turn].run(q, self._layers[layer], out=into, enable_pdl=self._early)

    def _leaves_idle(self, lengths: Int32, contexts: Int32) -> bool:
        """Whether a program for each tile and head is too few for half of the GPU, and each of them long."""
        programs = int((-(-lengths // TILE_TOKENS)).sum()) * self._query_heads
        return 2 * programs <= self._processors and int(contexts.max()) >= LONG_CONTEXT


class FlashInferDecode(Part):
    """XQA: reads tables and lengths on the device."""

    needs_block_table = True

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._layers = _paged(pool)
        self._workspace = _workspace(pool.device, DECODE_WORKSPACE_BYTES)
        self._scale = pool.layout.head_dim**-0.5
        self._batch: AttentionBatch | None = None

    def prepare(self, batch: AttentionBatch) -> None:
        self._batch = batch

    def forward(self, layer: int, q: torch.Tensor, into: torch.Tensor) -> None:
        batch, rows = self._batch, q.shape[0]
        assert batch is not None and batch.block_table is not None
        table = batch.block_table[:rows]
        xqa_batch_decode_with_kv_cache(
            q,
            self._layers[layer],
            self._workspace,
            table,
            batch.contexts[:rows].view(torch.uint32),
            table.shape[1] * self._pool.layout.page_size,
            bmm1_scale=self._scale,
            kv_layout="NHD",
            out=into,
        )


def _wrappers(device: torch.device, backend: str) -> list[flashinfer.BatchPrefillWithPagedKVCacheWrapper]:
    workspace = _workspace(device, WORKSPACE_BYTES)
    return [
        flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend)
        for _ in range(PLANS)
    ]


@cache
def _workspace(device: torch.device, size: int) -> torch.Tensor:
    """One for all pools of the process; zeros, as XQA wants its semaphores."""
    return torch.zeros(size, dtype=torch.uint8, device=device)


def _paged(pool: KVPool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """K and V of each layer as [pages, page_size, kv_heads, d]."""
    layout = pool.layout
    shape = (-1, layout.page_size, layout.kv_heads, layout.head_dim)
    sides = (pool.tokens(layer) for layer in range(layout.layers))
    return [(k.view(shape), v.view(shape)) for k, v in sides]


def _indptr(counts: Int32) -> Int32:
    """Where each of these many things begins, and where the last one ends."""
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int32)


def _pinned(values: Int32) -> torch.Tensor:
    return torch.from_numpy(values).pin_memory()
