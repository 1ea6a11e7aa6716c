"""The compute capability that FP8 needs, checked before anything is read."""

from typing import Final

from skiff_runtime.config import Config
from skiff_runtime.errors import ConfigError
from skiff_runtime.layers.weight_format import Fp8Format, WeightFormat

MIN_FP8_CAPABILITY: Final = (8, 9)
"""Compute capability of the first GPUs with FP8 (e4m3)."""


def check_fp8_support(
    config: Config, weight_format: WeightFormat | None, capability: tuple[int, int]
) -> None:
    """Raise ``ConfigError`` if a resolved configuration needs FP8 and a GPU of this compute capability lacks it."""
    if capability >= MIN_FP8_CAPABILITY:
        return
    needed_for = []
    if isinstance(weight_format, Fp8Format):
        needed_for.append("weights in fp8")
    if config.kv_cache_dtype == "fp8_e4m3":
        needed_for.append("--kv-cache-dtype fp8_e4m3")
    if needed_for:
        raise ConfigError(
            f"{' and '.join(needed_for)} need compute capability {_format(MIN_FP8_CAPABILITY)} or more, as of L4, H100 "
            f"and H200; this GPU has {_format(capability)}: use 16-bit weights and a 16-bit KV cache there"
        )


def _format(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
