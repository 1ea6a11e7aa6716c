"""Choice of the attention backend by the value of ``--attention-backend``: one name for all rows, or PREFILL,DECODE."""

import threading
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from typing import Final

import torch

from skiff_runtime.attention.base import AttentionBackend
from skiff_runtime.attention.torch_sdpa import TorchSDPABackend
from skiff_runtime.config import AUTO
from skiff_runtime.errors import ConfigError
from skiff_runtime.kernels.kernel_cache import may_have_flashinfer_modules
from skiff_runtime.kernels.tuning import tuning_for
from skiff_runtime.kvcache.kv_pool import KVPool


def make_backend(
    name: str, pool: KVPool, *, query_heads: int, max_model_len: int, small_prefill_tokens: int = 0
) -> AttentionBackend:
    """Build the backend ``name`` over ``pool``; ``auto`` chooses the fastest one for the pool's device.

    Layers have ``query_heads`` on this rank, and no sequence exceeds ``max_model_len`` tokens. With ``auto``, steps of
    at most ``small_prefill_tokens`` prefill tokens take the implementation that is launched soonest. Raises
    ``ConfigError`` for an unknown name, and for a backend that does not support this model on this device.
    """
    chosen = _choose_default(pool, query_heads) if name == AUTO else name
    if chosen in _BACKENDS:
        return _BACKENDS[chosen](pool)
    prefill, _, decode = chosen.partition(",")
    decode = decode or prefill
    for phase in (prefill, decode):
        if phase not in _PHASES:
            raise ConfigError(
                f"--attention-backend {name} is unknown; known are auto, {', '.join((*_BACKENDS, *_PHASES))}, and "
                f"{' and '.join(_PHASES)} as PREFILL,DECODE"
            )
    if pool.device.type != "cuda":
        raise ConfigError(f"--attention-backend {name} needs a GPU; on {pool.device.type} use torch or auto")
    from skiff_runtime.attention.hybrid import HybridAttention, TritonDecode, TritonPrefill

    if _FLASHINFER in (prefill, decode):
        return _make_with_flashinfer(
            prefill, decode, pool, query_heads, max_model_len, small_prefill_tokens if name == AUTO else 0
        )
    return HybridAttention(pool, TritonPrefill(pool), TritonDecode(pool, query_heads, max_model_len))


def import_ahead(name: str, device: torch.device) -> threading.Thread | None:
    """Start to import what the backend ``name`` on ``device`` may need, on a thread; None if that is nothing.

    FlashInfer is imported this way while the weights are read. An error is left to ``make_backend``, which imports it
    again.
    """
    is_needed = may_have_flashinfer_modules() if name == AUTO else _FLASHINFER in name
    if device.type != "cuda" or not is_needed or find_spec(_FLASHINFER) is None:
        return None
    thread = threading.Thread(target=_import_flashinfer, args=(device,), name="import-ahead", daemon=True)
    thread.start()
    return thread


def _import_flashinfer(device: torch.device) -> None:
    with suppress(Exception):
        torch.cuda.set_device(device)  # each thread has its own: the import must not open another GPU
        import_module(_FLASHINFER)


def _make_with_flashinfer(
    prefill: str, decode: str, pool: KVPool, query_heads: int, max_model_len: int, small_prefill_tokens: int
) -> AttentionBackend:
    if find_spec(_FLASHINFER) is None:
        raise ConfigError(
            "--attention-backend flashinfer needs the package flashinfer-python: in Skiff's sources, pip install '.[gpu]'"
        )
    from skiff_runtime.attention.flashinfer import FlashInferDecode, FlashInferPrefill, unsupported_reason
    from skiff_runtime.attention.hybrid import (
        HybridAttention,
        PhaseAttention,
        PrefillBySize,
        TritonDecode,
        TritonPrefill,
    )

    for phase, is_decode in ((prefill, False), (decode, True)):
        if phase == _FLASHINFER and (reason := unsupported_reason(pool, query_heads, decode=is_decode)):
            raise ConfigError(f"--attention-backend {prefill},{decode}: {reason}; use triton there, or auto")
    prefill_attention: PhaseAttention = TritonPrefill(pool)
    if prefill == _FLASHINFER:
        planned = FlashInferPrefill(pool, query_heads)
        prefill_attention = (
            PrefillBySize(
                prefill_attention,
                planned,
                max_small_tokens=small_prefill_tokens,
                long_context=tuning_for(pool.device).prefill_choice.long_context,
            )
            if small_prefill_tokens
            else planned
        )
    decode_attention = (
        FlashInferDecode(pool) if decode == _FLASHINFER else TritonDecode(pool, query_heads, max_model_len)
    )
    return HybridAttention(pool, prefill_attention, decode_attention)


def _choose_default(pool: KVPool, query_heads: int) -> str:
    """Choose by measurement: on a GPU, our decode kernel is the fastest, and FlashInfer's prefill where it is built."""
    if pool.device.type != "cuda":
        return _TORCH
    if find_spec(_FLASHINFER) is None or not may_have_flashinfer_modules():
        return _TRITON
    from skiff_runtime.attention.flashinfer import is_prefill_built, unsupported_reason

    is_ready = unsupported_reason(pool, query_heads, decode=False) is None and is_prefill_built(pool)
    return f"{_FLASHINFER},{_TRITON}" if is_ready else _TRITON


_TORCH: Final = "torch"
_TRITON: Final = "triton"
_FLASHINFER: Final = "flashinfer"
_BACKENDS: Final[dict[str, Callable[[KVPool], AttentionBackend]]] = {_TORCH: TorchSDPABackend}
"""Backends for all rows."""
_PHASES: Final = (_FLASHINFER, _TRITON)
"""Implementations for one phase, prefill or decode; they need a GPU."""
