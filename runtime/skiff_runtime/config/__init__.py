"""The configuration of a served model: its fields, the flags and environment variables that set them, limits and API keys."""

from skiff_runtime.config.config import (
    AUTO,
    Config,
    Device,
    Dtype,
    Quantization,
    TokenizerBackend,
    field_names,
    flag,
    option,
)

__all__ = [
    "AUTO",
    "Config",
    "Device",
    "Dtype",
    "Quantization",
    "TokenizerBackend",
    "field_names",
    "flag",
    "option",
]
