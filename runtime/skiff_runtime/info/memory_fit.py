"""Whether a model fits a GPU, and what then remains for the KV cache: the engine's own reckoning, ahead of it."""

from dataclasses import dataclass, replace
from typing import Final

from skiff_runtime.config import AUTO, Config, Quantization
from skiff_runtime.info.gpus import Gpu
from skiff_runtime.models.config import ModelConfig
from skiff_runtime.models.footprint import (
    DTYPE_BYTES,
    Parameters,
    count_parameters,
    estimate_working_bytes,
    kv_bytes_per_token,
    weight_bytes,
)

LIBRARY_BYTES: Final = 1 << 30
"""Taken for what the driver, CUDA libraries and NCCL hold on a GPU before any model is there."""


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that one rank needs, by part. ``context`` is the longest sequence in tokens."""

    parameters: Parameters
    quantization: Quantization
    weights: int
    kv_per_token: int
    working: int
    context: int

    @property
    def kv_for_context(self) -> int:
        """KV cache of one sequence of full length."""
        return self.kv_per_token * self.context


@dataclass(frozen=True, slots=True)
class Fit:
    """What one kind of GPU makes of it. ``kv_tokens`` is 0 where the model does not fit."""

    gpu: Gpu
    kv_tokens: int
    longest: int

    @property
    def fits(self) -> bool:
        """Whether any request could be served."""
        return self.kv_tokens >= 2

    @property
    def full_length_requests(self) -> float:
        """How many sequences of full length the cache holds at a time."""
        return self.kv_tokens / self.longest


def need(config: Config, model: ModelConfig, dtype: str) -> Need:
    """What each of ``config.tp_size`` ranks needs in ``dtype``; the first rank's, which is as much as any's."""
    element_bytes = DTYPE_BYTES[dtype]
    cached_bytes = element_bytes if config.kv_cache_dtype == AUTO else 1
    quantization = model.quantization if config.quantization == AUTO else config.quantization
    return Need(
        parameters=count_parameters(model),
        quantization=quantization,
        weights=weight_bytes(model, config.tp_size, element_bytes=element_bytes, quantization=quantization),
        kv_per_token=kv_bytes_per_token(model, config.tp_size, cached_bytes),
        working=estimate_working_bytes(
            replace(config, quantization=quantization),
            model,
            ranks=config.tp_size,
            element_bytes=element_bytes,
        ),
        context=config.max_model_len or model.max_position_embeddings,
    )


def fit(config: Config, needed: Need, gpu: Gpu) -> Fit:
    """As the engine divides a GPU's memory: a share of what the weights leave, less what steps work in."""
    free = gpu.memory_bytes - LIBRARY_BYTES - needed.weights
    usable = int(max(free, 0) * config.mem_fraction_static) - needed.working
    pages = usable // (needed.kv_per_token * config.page_size) - 1  # one page is for padding
    return Fit(gpu, max(pages, 0) * config.page_size, needed.context)
