"""The model runner of one rank: loads the model, sizes its KV pool, and computes the logits of a step."""

import math
from collections.abc import Callable
from typing import Final

import torch

from skiff_runtime.attention.base import AttentionBackend
from skiff_runtime.attention.selector import make_backend
from skiff_runtime.config import Config
from skiff_runtime.distributed.tensor_parallel import TensorParallelGroup
from skiff_runtime.engine.forward_pass import ForwardPass
from skiff_runtime.engine.fp8_support import check_fp8_support
from skiff_runtime.engine.free_memory import free_bytes
from skiff_runtime.engine.launch_bound import launch_bound_tokens
from skiff_runtime.errors import ConfigError
from skiff_runtime.kernels.fp8_tensors import E4M3
from skiff_runtime.kernels.tuning import tuning_for
from skiff_runtime.kvcache.kv_pool import KVLayout, KVPool, plan_capacity
from skiff_runtime.layers.lora import LoraState
from skiff_runtime.layers.sharding import LayerContext
from skiff_runtime.layers.weight_format import Fp8Format, choose_weight_format
from skiff_runtime.models.config import ModelConfig
from skiff_runtime.models.decoder import DecoderModel
from skiff_runtime.models.footprint import DTYPE_BYTES, estimate_working_bytes
from skiff_runtime.models.registry import make_model
from skiff_runtime.models.weight_loader import load_weights

MIB: Final = 1 << 20

PhaseCallback = Callable[[str, float], None]
"""Called with the name of a start phase and the progress in it, 0 to 1."""


class ModelRunner(ForwardPass):
    """Model, KV pool and attention backend of one rank. ``config`` is resolved: no field of it is ``auto``."""

    def __init__(
        self, config: Config, model: ModelConfig, group: TensorParallelGroup, *, on_phase: PhaseCallback
    ) -> None:
        """Load the weights; ``allocate_kv_cache`` allocates the KV cache."""
        self._config = config
        self._model_config = model
        self._group = group
        if group.device.type == "cuda":
            from skiff_runtime.kernels.triton.runtime.cache_keys import compute_cache_keys
            from skiff_runtime.kernels.triton.runtime.compilation_log import log_compilations

            weight_format = choose_weight_format(config.quantization, model.weight_format)
            check_fp8_support(config, weight_format, torch.cuda.get_device_capability(group.device))
            compute_cache_keys()
            log_compilations()
        context = make_layer_context(config, model, group)
        group.allocate_exchange(config.max_num_batched_tokens * model.hidden_size * context.dtype.itemsize)
        self.lora = context.lora
        """None without ``--enable-lora``."""
        on_phase("weights", 0.0)
        self._check_memory(model, context)
        loaded = self._load(model, context, on_phase)
        on_phase("kv_cache", 0.0)
        # A barrier. On a CPU the ranks share one memory, so all weights must be there before any rank measures it.
        group.all_reduce_min(0)
        self._kv_layout = make_kv_layout(config, loaded, context.dtype, tp_size=group.tp_size)
        self.query_shape = loaded.heads.local_heads(group.tp_size), loaded.heads.head_dim
        """(Heads, dimension) of one token's queries on this rank."""
        # A pool of one page, over which the memory profile runs; ``use_pool`` replaces it.
        self.pool = KVPool(self._kv_layout, 1, group.device)
        super().__init__(loaded, self._make_backend(self.pool), group.device)

    def allocate_kv_cache(self, reserved_bytes: int | None = None) -> None:
        """Give the KV cache the memory that remains when ``reserved_bytes`` are kept free (None: an estimate of these).

        The ranks agree on the smallest number of pages, because they plan the same steps.
        """
        free = self._group.all_reduce_min(self._rank_share(free_bytes(self.device)))
        pages = self._group.all_reduce_min(self._plan_pages(self._kv_layout, free, reserved_bytes))
        self.use_pool(KVPool(self._kv_layout, pages, self.device))

    def use_pool(self, pool: KVPool) -> None:
        """Compute over this pool from now on."""
        self.pool = pool
        self.backend = self._make_backend(pool)

    def zeros(self, tokens: int, *shape: int) -> torch.Tensor:
        """Allocate zeros [tokens, *shape] in the model's dtype."""
        return torch.zeros((tokens, *shape), dtype=getattr(torch, self._config.dtype), device=self.device)

    @property
    def hidden_size(self) -> int:
        return self._model_config.hidden_size

    def _make_backend(self, pool: KVPool) -> AttentionBackend:
        weight_format = choose_weight_format(self._config.quantization, self._model_config.weight_format)
        element_bytes = 1 if isinstance(weight_format, Fp8Format) else DTYPE_BYTES[self._config.dtype]
        launch_bound = launch_bound_tokens(
            self._model_config,
            self._group.tp_size,
            element_bytes,
            tuning_for(self._group.device).prefill_choice,
        )
        return make_backend(
            self._config.attention_backend,
            pool,
            query_heads=self.query_shape[0],
            max_model_len=effective_max_model_len(self._config, self._model_config),
            # The largest step is not small, so that the memory profile measures the implementation for many tokens.
            small_prefill_tokens=min(launch_bound, self._config.max_num_batched_tokens - 1),
        )

    def _load(self, model: ModelConfig, context: LayerContext, on_phase: PhaseCallback) -> DecoderModel:
        max_positions = effective_max_model_len(self._config, model)
        loaded = make_model(model, context, max_positions=max_positions)
        self.lora_layers = list(loaded.lora_layers())
        load_weights(loaded, self._config.load_format, lambda progress: on_phase("weights", progress))
        return loaded

    def _check_memory(self, model: ModelConfig, context: LayerContext) -> None:
        """Raise ``ConfigError`` if weights or KV cache cannot fit, before either is read or allocated."""
        meta_model = make_model(model, context.on_meta_device(), max_positions=1)
        needed = meta_model.weight_bytes()
        free = self._rank_share(free_bytes(context.device))
        if needed > free:
            raise ConfigError(
                f"the weights take {needed / MIB:.4g} MiB on each rank in {self._config.dtype}, but {free / MIB:.4g} MiB "
                "are free; use a smaller model, a smaller --dtype, more memory, or a larger --tp"
            )
        layout = make_kv_layout(self._config, meta_model, context.dtype, tp_size=self._group.tp_size)
        self._plan_pages(layout, free - needed)

    def _plan_pages(self, layout: KVLayout, free: int, reserved: int | None = None) -> int:
        """Return the number of pages on each rank, when its weights leave ``free`` bytes."""
        if reserved is None:
            element_bytes = DTYPE_BYTES[self._config.dtype]
            reserved = estimate_working_bytes(
                self._config, self._model_config, tp_size=self._group.tp_size, element_bytes=element_bytes
            )
        return plan_capacity(
            self._config,
            layout,
            free_bytes=free,
            reserved_bytes=reserved,
            max_model_len=effective_max_model_len(self._config, self._model_config),
        )

    def _rank_share(self, free: int) -> int:
        """Return the part of ``free`` bytes that one rank may take; ranks on a CPU share the machine's memory."""
        return free // self._group.tp_size if self._group.device.type == "cpu" else free


def effective_max_model_len(config: Config, model: ModelConfig) -> int:
    """Return the number of tokens of the longest sequence that is served."""
    return config.max_model_len or model.max_position_embeddings


def make_layer_context(config: Config, model: ModelConfig, group: TensorParallelGroup) -> LayerContext:
    """Return dtype, device, quantization and LoRA of the layers of a rank of ``group``, by a resolved configuration.

    Raises ``ConfigError`` if the kernels do not support ``--max-lora-rank``.
    """
    scale_ub = math.inf if model.activation_scale_ub is None else model.activation_scale_ub
    dtype = getattr(torch, config.dtype)
    return LayerContext(
        dtype,
        group.device,
        group,
        config.quantization,
        scale_ub,
        model.unquantized,
        model.weight_format,
        config.expert_parallel,
        lora=_make_lora_state(config, group.device),
    )


def _make_lora_state(config: Config, device: torch.device) -> LoraState | None:
    """Return the state of LoRA on a rank, None without ``--enable-lora``. Raises ``ConfigError`` for a rank beyond the kernels'."""
    if not config.enable_lora:
        return None
    try:
        return LoraState(
            device,
            max_loras=config.max_loras,
            max_rank=config.max_lora_rank,
            max_tokens=config.max_num_batched_tokens,
        )
    except ValueError as error:
        raise ConfigError(f"--max-lora-rank {config.max_lora_rank}: {error}") from None


def make_kv_layout(config: Config, model: DecoderModel, dtype: torch.dtype, *, tp_size: int) -> KVLayout:
    """Return the layout of K and V on each of ``tp_size`` ranks, for a model in ``dtype``."""
    return KVLayout(
        layers=model.config.num_layers,
        kv_heads=model.heads.local_kv_heads(tp_size),
        head_dim=model.config.head_dim,
        page_size=config.page_size,
        dtype=E4M3 if config.kv_cache_dtype == "fp8_e4m3" else dtype,
        windows=model.config.sliding_windows,
    )
