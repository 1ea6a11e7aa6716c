"""Memory of a model, and the KV cache that fits beside it on a GPU, estimated with the engine's own formulas."""

from dataclasses import dataclass, replace
from typing import Final

from skiff_runtime.config import AUTO, Config, Quantization
from skiff_runtime.models.config import ModelConfig
from skiff_runtime.models.footprint import (
    DTYPE_BYTES,
    ParameterCounts,
    count_parameters,
    estimate_weight_bytes,
    estimate_working_bytes,
    kv_bytes_per_token,
    kv_bytes_read,
)
from skiff_runtime.processes.resolve import choose_quantization

LIBRARY_BYTES: Final = 1 << 30
"""Assumed for the driver, the CUDA libraries, NCCL, and the buffers of peer-to-peer sums on a GPU."""
MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Gpu:
    """A kind of GPU, or a GPU with a given amount of memory."""

    name: str
    memory_bytes: int


GPUS: Final = tuple(
    Gpu(name, mib * MIB)
    for name, mib in (
        ("B200", 183_359),
        ("H200", 143_771),
        ("H100", 81_559),
        ("H20", 97_871),
        ("A100-80", 81_920),
        ("A100-40", 40_960),
        ("A6000", 49_140),
        ("L40S", 46_068),
        ("RTX4090", 24_564),
        ("L4", 23_034),
        ("A10", 23_028),
    )
)
"""Common GPUs with the total memory that their drivers report."""


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Memory that each rank needs, by part, in bytes. ``max_model_len`` is the longest sequence in tokens.

    ``kv_bytes_read_at_max_model_len`` are read by a decode step for one such sequence; with sliding windows, that is
    less than the cache holds of it.
    """

    parameters: ParameterCounts
    quantization: Quantization
    weight_bytes: int
    kv_bytes_per_token: int
    kv_bytes_read_at_max_model_len: int
    working_bytes: int
    max_model_len: int

    @property
    def kv_bytes_for_max_model_len(self) -> int:
        """Bytes of KV cache of one sequence of full length."""
        return self.kv_bytes_per_token * self.max_model_len


@dataclass(frozen=True, slots=True)
class GpuFit:
    """The KV cache that remains on one kind of GPU. ``kv_tokens`` is 0 if the model does not fit."""

    gpu: Gpu
    kv_tokens: int
    max_model_len: int

    @property
    def fits(self) -> bool:
        """True if the GPU can serve the smallest request: a token of prompt and one of output."""
        return self.kv_tokens >= 2

    @property
    def full_length_requests(self) -> float:
        """Number of sequences of full length that the cache holds at the same time."""
        return self.kv_tokens / self.max_model_len


def estimate_memory(config: Config, model: ModelConfig, dtype: str) -> MemoryNeed:
    """Estimate the memory of each of ``config.tp_size`` ranks in ``dtype``: that of the first rank, which no other exceeds."""
    element_bytes = DTYPE_BYTES[dtype]
    kv_element_bytes = element_bytes if config.kv_cache_dtype == AUTO else 1
    quantization = choose_quantization(config, model)
    max_model_len = config.max_model_len or model.max_position_embeddings
    return MemoryNeed(
        parameters=count_parameters(model),
        quantization=quantization,
        weight_bytes=estimate_weight_bytes(
            model,
            config.tp_size,
            element_bytes=element_bytes,
            quantization=quantization,
            expert_parallel=config.expert_parallel,
        ),
        kv_bytes_per_token=kv_bytes_per_token(model, config.tp_size, kv_element_bytes),
        kv_bytes_read_at_max_model_len=kv_bytes_read(model, config.tp_size, kv_element_bytes, max_model_len),
        working_bytes=estimate_working_bytes(
            replace(config, quantization=quantization),
            model,
            tp_size=config.tp_size,
            element_bytes=element_bytes,
        ),
        max_model_len=max_model_len,
    )


def fit_gpu(config: Config, need: MemoryNeed, gpu: Gpu) -> GpuFit:
    """Divide the memory of ``gpu`` like the engine: ``mem_fraction_static`` of what the weights leave, less the working memory."""
    free = gpu.memory_bytes - LIBRARY_BYTES - need.weight_bytes
    usable = int(max(free, 0) * config.mem_fraction_static) - need.working_bytes
    pages = usable // (need.kv_bytes_per_token * config.page_size) - 1  # one page is the padding page
    return GpuFit(gpu, max(pages, 0) * config.page_size, need.max_model_len)
