"""Attention backends by the name that ``--attention`` takes."""

from collections.abc import Callable
from typing import Final

from skiff_runtime.attention.base import AttentionBackend
from skiff_runtime.attention.torch_backend import TorchAttention
from skiff_runtime.config import AUTO
from skiff_runtime.errors import ConfigError
from skiff_runtime.kvcache.pool import KVPool

_BACKENDS: Final[dict[str, Callable[[KVPool], AttentionBackend]]] = {"torch": TorchAttention}
_DEFAULTS: Final = {"cpu": "torch", "cuda": "torch"}


def make_backend(name: str, pool: KVPool) -> AttentionBackend:
    """The backend ``name`` over ``pool``; ``auto`` takes the best one for the pool's device."""
    chosen = _DEFAULTS[pool.device.type] if name == AUTO else name
    if chosen not in _BACKENDS:
        raise ConfigError(f"--attention {name} is unknown; known are auto, {', '.join(_BACKENDS)}")
    return _BACKENDS[chosen](pool)
