"""Attention backends by the name that ``--attention-backend`` takes: one for all, or PREFILL,DECODE."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Final

from skiff_runtime.attention.base import AttentionBackend
from skiff_runtime.attention.torch_sdpa import TorchSDPABackend
from skiff_runtime.config import AUTO
from skiff_runtime.errors import ConfigError
from skiff_runtime.kvcache.kv_pool import KVPool


def make_backend(
    name: str, pool: KVPool, *, query_heads: int, longest: int, small_prefill_tokens: int = 0
) -> AttentionBackend:
    """The backend ``name`` over ``pool``; ``auto`` takes the best one for the pool's device.

    Layers have ``query_heads`` on this rank, and no sequence exceeds ``longest`` tokens. With ``auto``, steps of up to
    ``small_prefill_tokens`` of prompts are for what is quickest to launch. Raises ConfigError for what is unknown, or cannot serve
    this model on this device.
    """
    chosen = _default(pool, query_heads) if name == AUTO else name
    if chosen in _WHOLE:
        return _WHOLE[chosen](pool)
    prefill, _, decode = chosen.partition(",")
    decode = decode or prefill
    for part in (prefill, decode):
        if part not in _PARTS:
            raise ConfigError(
                f"--attention-backend {name} is unknown; known are auto, {', '.join((*_WHOLE, *_PARTS))}, and "
                f"{' and '.join(_PARTS)} as PREFILL,DECODE"
            )
    if pool.device.type != "cuda":
        raise ConfigError(f"--attention-backend {name} needs a GPU; on {pool.device.type} use torch or auto")
    from skiff_runtime.attention.hybrid import HybridAttention, TritonDecode, TritonPrefill

    if _FLASHINFER in (prefill, decode):
        return _with_flashinfer(
            prefill, decode, pool, query_heads, longest, small_prefill_tokens if name == AUTO else 0
        )
    return HybridAttention(pool, TritonPrefill(pool), TritonDecode(pool, query_heads, longest))


def _with_flashinfer(
    prefill: str, decode: str, pool: KVPool, query_heads: int, longest: int, small_prefill_tokens: int
) -> AttentionBackend:
    if find_spec(_FLASHINFER) is None:
        raise ConfigError(
            "--attention-backend flashinfer needs the package flashinfer-python: in Skiff's sources, pip install '.[gpu]'"
        )
    from skiff_runtime.attention.flashinfer import FlashInferDecode, FlashInferPrefill, unsupported_reason
    from skiff_runtime.attention.hybrid import (
        HybridAttention,
        Part,
        PrefillBySize,
        TritonDecode,
        TritonPrefill,
    )

    for part, is_decode in ((prefill, False), (decode, True)):
        if part == _FLASHINFER and (reason := unsupported_reason(pool, query_heads, decode=is_decode)):
            raise ConfigError(f"--attention-backend {prefill},{decode}: {reason}; use triton there, or auto")
    chunks: Part = TritonPrefill(pool)
    if prefill == _FLASHINFER:
        planned = FlashInferPrefill(pool, query_heads)
        chunks = (
            PrefillBySize(chunks, planned, most=small_prefill_tokens) if small_prefill_tokens else planned
        )
    rows = FlashInferDecode(pool) if decode == _FLASHINFER else TritonDecode(pool, query_heads, longest)
    return HybridAttention(pool, chunks, rows)


def _default(pool: KVPool, query_heads: int) -> str:
    """On a GPU our own kernel decodes, for it is ahead; FlashInfer's prefill is ahead of ours where it is built."""
    if pool.device.type != "cuda":
        return _TORCH
    if find_spec(_FLASHINFER) is None:
        return _TRITON
    from skiff_runtime.attention.flashinfer import is_prefill_built, unsupported_reason

    ready = unsupported_reason(pool, query_heads, decode=False) is None and is_prefill_built(pool)
    return f"{_FLASHINFER},{_TRITON}" if ready else _TRITON


_TORCH: Final = "torch"
_TRITON: Final = "triton"
_FLASHINFER: Final = "flashinfer"
_WHOLE: Final[dict[str, Callable[[KVPool], AttentionBackend]]] = {_TORCH: TorchSDPABackend}
"""Backends for all rows."""
_PARTS: Final = (_FLASHINFER, _TRITON)
"""What attends for prefill or for decode, on a GPU."""
