"""Configuration of a served model: its fields, their flags and environment variables, limits and API keys."""

from skiff_runtime.config.config import (
    AUTO,
    AllReduceBackend,
    Config,
    Device,
    Dtype,
    Quantization,
    QuantizationOption,
    TokenizerBackend,
    field_names,
    flag,
    option,
)

__all__ = [
    "AUTO",
    "AllReduceBackend",
    "Config",
    "Device",
    "Dtype",
    "Quantization",
    "QuantizationOption",
    "TokenizerBackend",
    "field_names",
    "flag",
    "option",
]
