"""One rank's model over its KV pool: loads it, sizes the pool, and computes logits of a step."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import torch

from skiff_runtime.attention.base import AttentionBackend
from skiff_runtime.attention.selector import make_backend
from skiff_runtime.config import Config, Quantization
from skiff_runtime.distributed.tensor_parallel import TensorParallelGroup
from skiff_runtime.engine.forward_pass import ForwardPass
from skiff_runtime.engine.fp8_support import check_fp8_support
from skiff_runtime.engine.free_memory import free_bytes
from skiff_runtime.engine.launch_bound import launch_bound_tokens
from skiff_runtime.errors import ConfigError
from skiff_runtime.kernels.e4m3 import E4M3
from skiff_runtime.kvcache.kv_pool import KVLayout, KVPool, plan_capacity
from skiff_runtime.layers.sharding import LayerContext
from skiff_runtime.models.config import ModelConfig
from skiff_runtime.models.decoder import DecoderModel
from skiff_runtime.models.footprint import DTYPE_BYTES, estimate_working_bytes
from skiff_runtime.models.registry import make_model
from skiff_runtime.models.weight_loader import load_weights, weight_bytes

MIB: Final = 1 << 20

PhaseCallback = Callable[[str, float], None]


class ModelRunner(ForwardPass):
    """Model, pool and attention backend of one rank. ``config`` is resolved: nothing in it is ``auto``."""

    def __init__(
        self, config: Config, model: ModelConfig, group: TensorParallelGroup, *, on_phase: PhaseCallback
    ) -> None:
        """Load the weights; the KV cache comes with ``allocate``."""
        self._config = config
        self._model_config = model
        self._group = group
        if group.device.type == "cuda":
            from skiff_runtime.kernels.triton.runtime.cache_keys import compute_cache_keys
            from skiff_runtime.kernels.triton.runtime.compilation_log import log_compilations

            check_fp8_support(config, torch.cuda.get_device_capability(group.device))
            compute_cache_keys()
            log_compilations()
        placement = make_layer_context(config, model, group)
        on_phase("weights", 0.0)
        self._check_room(model, placement)
        loaded = self._load(model, placement, on_phase)
        on_phase("kv_cache", 0.0)
        group.minimum(0)  # every rank holds its weights from here on
        self._kv_layout = kv_layout(config, loaded, placement.dtype, ranks=group.size)
        self.query_shape = loaded.heads.local_query_heads(group.size), loaded.heads.size
        """Heads and dimensions of a token's queries on this rank."""
        self.pool = KVPool(self._kv_layout, 1, group.device)
        super().__init__(loaded, self._backend_over(self.pool), group.device)

    def allocate(self, reserved_bytes: int | None = None) -> None:
        """Give the KV cache what remains when ``reserved_bytes`` are kept for all else; None: an estimate of these."""
        free = self._group.minimum(self._share(free_bytes(self.device)))
        pages = self._group.minimum(self._capacity(self._kv_layout, free, reserved_bytes))
        self.attach(KVPool(self._kv_layout, pages, self.device))

    def attach(self, pool: KVPool) -> None:
        """Compute over this pool from now on."""
        self.pool = pool
        self.backend = self._backend_over(pool)

    def room(self, tokens: int, *shape: int) -> torch.Tensor:
        """Zeros [tokens, *shape] in the model's type."""
        return torch.zeros((tokens, *shape), dtype=getattr(torch, self._config.dtype), device=self.device)

    @property
    def hidden_size(self) -> int:
        return self._model_config.hidden_size

    def _backend_over(self, pool: KVPool) -> AttentionBackend:
        element_bytes = 1 if self._config.quantization == "fp8" else DTYPE_BYTES[self._config.dtype]
        host_bound = launch_bound_tokens(self._model_config, self._group.size, element_bytes)
        return make_backend(
            self._config.attention_backend,
            pool,
            query_heads=self.query_shape[0],
            longest=longest(self._config, self._model_config),
            # The largest step is not among them, so that the profile of memory meets the part for many tokens.
            small_prefill_tokens=min(host_bound, self._config.max_num_batched_tokens - 1),
        )

    def _load(self, model: ModelConfig, placement: LayerContext, on_phase: PhaseCallback) -> DecoderModel:
        loaded = make_model(model, placement, max_positions=longest(self._config, model))
        load_weights(loaded, self._config.load_format, lambda share: on_phase("weights", share))
        return loaded

    def _check_room(self, model: ModelConfig, placement: LayerContext) -> None:
        """Refuse what cannot fit, weights or KV cache, before anything of its size is read or allocated."""
        ghost = make_model(model, replace(placement, device=torch.device("meta")), max_positions=1)
        needed = weight_bytes(ghost)
        free = self._share(free_bytes(placement.device))
        if needed > free:
            raise ConfigError(
                f"the weights take {needed / MIB:.4g} MiB on each rank in {self._config.dtype}, but {free / MIB:.4g} MiB "
                "are free; use a smaller model, a shorter --dtype, more memory, or a larger --tp"
            )
        layout = kv_layout(self._config, ghost, placement.dtype, ranks=self._group.size)
        self._capacity(layout, free - needed)

    def _capacity(self, layout: KVLayout, free: int, reserved: int | None = None) -> int:
        """Pages on each rank, when its weights leave ``free`` bytes."""
        if reserved is None:
            element_bytes = DTYPE_BYTES[self._config.dtype]
            reserved = estimate_working_bytes(
                self._config, self._model_config, ranks=self._group.size, element_bytes=element_bytes
            )
        return plan_capacity(
            self._config,
            layout,
            free_bytes=free,
            reserved_bytes=reserved,
            max_model_len=longest(self._config, self._model_config),
        )

    def _share(self, free: int) -> int:
        """What one rank may take: ranks on a CPU share the machine."""
        return free // self._group.size if self._group.device.type == "cpu" else free


def longest(config: Config, model: ModelConfig) -> int:
    """Tokens of the longest sequence that is served."""
    return config.max_model_len or model.max_position_embeddings


def make_layer_context(config: Config, model: ModelConfig, group: TensorParallelGroup) -> LayerContext:
    """Where and how a rank of ``group`` keeps the model, by a resolved configuration."""
    quantization: Quantization = "fp8" if config.quantization == "fp8" else "none"
    bound = math.inf if model.activation_scale_ub is None else model.activation_scale_ub
    dtype = getattr(torch, config.dtype)
    return LayerContext(dtype, group.device, group, quantization, bound, model.unquantized)


def kv_layout(config: Config, model: DecoderModel, dtype: torch.dtype, *, ranks: int) -> KVLayout:
    """How each of ``ranks`` ranks keeps K and V of a model in ``dtype``."""
    return KVLayout(
        layers=model.config.num_layers,
        kv_heads=model.heads.local_kv(ranks),
        head_dim=model.config.head_dim,
        page_size=config.page_size,
        dtype=E4M3 if config.kv_cache_dtype == "fp8_e4m3" else dtype,
    )
