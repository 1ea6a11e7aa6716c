"""What eight bits need of a GPU; asked before anything is read."""

from typing import Final

from skiff_runtime.config import Config
from skiff_runtime.errors import ConfigError

MIN_FP8_CAPABILITY: Final = (8, 9)
"""Compute capability of the first GPUs that know e4m3."""


def check_fp8_support(config: Config, capability: tuple[int, int]) -> None:
    """Raise ``ConfigError`` where a resolved configuration has weights or a cache that such a GPU cannot read."""
    if capability >= MIN_FP8_CAPABILITY:
        return
    asked = []
    if config.quantization == "fp8":
        asked.append("weights in fp8")
    if config.kv_cache_dtype == "fp8_e4m3":
        asked.append("--kv-cache-dtype fp8_e4m3")
    if asked:
        raise ConfigError(
            f"{' and '.join(asked)} need compute capability {_named(MIN_FP8_CAPABILITY)} or more, as of L4, H100 and H200; "
            f"this GPU has {_named(capability)}: take weights and a cache of 16 bits there"
        )


def _named(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
