"""Ahead-of-time compilation: runs a model's steps on fake tensors, which compiles every Triton kernel of real steps.

It needs no GPU. The tensors are torch's fake ones, so only shapes, dtypes and alignment are computed, and Triton's
driver compiles for a given architecture and launches nothing.
"""

from typing import Final

import numpy as np
import torch

from skiff_runtime.attention.base import AttentionBatch
from skiff_runtime.attention.hybrid import HybridAttention, TritonDecode, TritonPrefill
from skiff_runtime.config import Config
from skiff_runtime.distributed.copy_exchange import EXCHANGE_RANKS
from skiff_runtime.distributed.tensor_parallel import DetachedRank
from skiff_runtime.engine.decode_graph import DecodeGraphRunner
from skiff_runtime.engine.forward_pass import ForwardPass
from skiff_runtime.engine.input_batch import SlotTables
from skiff_runtime.engine.model_runner import effective_max_model_len, make_kv_layout, make_layer_context
from skiff_runtime.engine.sampler import Sampler
from skiff_runtime.kernels.penalties import apply_penalties
from skiff_runtime.kernels.prepare_inputs import prepare_inputs
from skiff_runtime.kernels.sampling import sample_tokens
from skiff_runtime.kernels.shared_prefixes import SharedPrefixes, packed_size, unpack_shared_prefixes
from skiff_runtime.kernels.step_inputs import StepInputs
from skiff_runtime.kernels.token_bitmask import apply_token_bitmask, bitmask_words
from skiff_runtime.kernels.torch_internals import FakeTensorMode
from skiff_runtime.kernels.triton.attention.decode_attention import find_row_counts_by_variant
from skiff_runtime.kernels.triton.lora.add_lora import find_token_counts_by_variant
from skiff_runtime.kernels.triton.lora.fill_slot import fill_slot
from skiff_runtime.kernels.triton.prepare_inputs import gather_pages, write_cells
from skiff_runtime.kernels.triton.runtime.cache_keys import compute_cache_keys
from skiff_runtime.kernels.triton.runtime.compilation_log import log_compilations
from skiff_runtime.kernels.tuning import tuning_for
from skiff_runtime.kvcache.kv_pool import KVPool
from skiff_runtime.layers.norm import QuantizingRMSNorm
from skiff_runtime.layers.partial_sum import ExchangedSum, PartialSum
from skiff_runtime.models.config import ModelConfig
from skiff_runtime.models.registry import make_model
from skiff_runtime.prebuild.offline_driver import LaunchSignature, use_offline_driver

MIXED_BATCHES: Final = ((0, 16), (0, 17), (2, 33), (16, 64), (0, 67))
"""(Decode rows, tokens of one prefill row) of the mixed batches to run, besides those with ``VARIANT_TOKENS``."""
VARIANT_TOKENS: Final = 16
"""Prefill tokens beside each number of decode rows for which attention has kernels of its own."""


def compile_ahead_of_time(config: Config, model: ModelConfig, architecture: int) -> list[LaunchSignature]:
    """Compile the kernels that a rank of this resolved configuration launches; return their launch signatures.

    ``architecture`` is a compute capability, 90 for 9.0. The rank is rank 0 of its group: the shards of all ranks have
    the same sizes, so the others launch the same kernels.
    """
    compute_cache_keys()
    log_compilations()
    with use_offline_driver(architecture) as driver, FakeTensorMode(), torch.inference_mode():
        rank = _FakeRank(config, model)
        for key in rank.decode_graphs.graph_keys:
            for part in rank.decode_graphs.parts(*key):
                rank.decode_graphs.compute(part)
        for decode_rows, tokens in (*MIXED_BATCHES, *_list_expert_batches(config, model)):
            rank.run_mixed(min(decode_rows, config.running_limit), tokens)
        if config.enable_lora:
            for tokens in rank.find_adapter_token_counts(config):
                rank.run_adapters(tokens)
            rank.load_adapter()
        rank.sum_messages()
        rank.run_without_peers()
        for shared in (False, True):
            for decode_rows in rank.find_row_counts(shared=shared):
                rank.run_mixed(decode_rows, VARIANT_TOKENS, shared=shared)
        return driver.launched


def _list_expert_batches(config: Config, model: ModelConfig) -> list[tuple[int, int]]:
    """Return mixed batches like ``MIXED_BATCHES`` of all powers of two, because the kernels of experts differ by the number of tokens."""
    if model.moe is None:
        return []
    return [(0, tokens) for tokens in _list_powers_of_two(config.max_num_batched_tokens)]


def _list_powers_of_two(limit: int) -> list[int]:
    return [1 << exponent for exponent in range(limit.bit_length())]


class _FakeRank:
    """A rank's model, KV cache and tables, all of fake tensors."""

    def __init__(self, config: Config, model: ModelConfig) -> None:
        self._device = torch.device("cuda", 0)
        max_model_len, tp_size = effective_max_model_len(config, model), config.tp_size
        self._group = DetachedRank(0, tp_size, self._device)
        context = make_layer_context(config, model, self._group)
        self._dtype = context.dtype
        self._norms = [
            QuantizingRMSNorm(model.hidden_size, model.rms_norm_eps, each)
            for each in (context, context.without_quantization())
        ]
        built = make_model(model, context, max_positions=max_model_len)
        self._lora_layers = [layer for _, layer in built.lora_layers()]
        layout = make_kv_layout(config, built, context.dtype, tp_size=tp_size)
        pool = KVPool(layout, 1, self._device)
        decode = TritonDecode(pool, built.heads.local_heads(tp_size), max_model_len)
        backend = HybridAttention(pool, TritonPrefill(pool), decode)
        self._pass = ForwardPass(built, backend, self._device)
        self._attention_shape = (
            self._device,
            config.running_limit,
            layout.kv_heads,
        )
        self._attention_types = context.dtype, layout.dtype, model.head_dim
        self._max_model_len, self._windows = max_model_len, layout.distinct_windows
        cpu = torch.device("cpu")  # no staging buffers: pinned memory needs a driver
        self._tables = SlotTables(config.max_running_requests, max_model_len, config.page_size, cpu)
        self._tables.enable_shared_prefix(0 if config.disable_cascade_attn else backend.shared_prefix_rows)
        if config.enable_lora:
            self._tables.enable_lora()
            assert self._tables.lora_slots is not None
            # On the device, because an operation of torch reads it, and not only kernels.
            self._tables.lora_slots = self._tables.lora_slots.to(self._device)
        self._sampler = Sampler(self._tables.padding_slot + 1, cpu, built.vocab_shard)
        self.decode_graphs = DecodeGraphRunner(
            self._pass, self._tables, self._sampler, rows=config.running_limit
        )

    def find_row_counts(self, *, shared: bool) -> list[int]:
        """Return numbers of decode rows that together launch every variant of the attention kernels."""
        if shared and self._tables.shared_prefix is None:
            return []
        counts: list[int] = []
        for window in [None] if shared else self._windows:
            longest = min(self._max_model_len, window or self._max_model_len)
            counts += find_row_counts_by_variant(
                *self._attention_shape, longest, *self._attention_types, shared=shared
            )
        return sorted(frozenset(counts))

    def run_mixed(self, decode_rows: int, tokens: int, *, shared: bool = False) -> None:
        """Run a mixed batch of decode rows and one prefill row of ``tokens`` tokens."""
        inputs, attention = self._make_batch(decode_rows, tokens, shared=shared)
        rows = attention.rows
        sampled = torch.empty((3, decode_rows + 1), dtype=torch.int32, device=self._device)
        logits = self._pass.logits(self._pass.forward_selected(inputs, attention, sampled[0]))
        self.sample(logits, sampled)
        gather_pages(self._tables.page_table, rows[0, decode_rows:], rows[0], total=1)

    def find_adapter_token_counts(self, config: Config) -> list[int]:
        """Return numbers of tokens with LoRA adapters that together launch every variant of their kernels."""
        weights = [layer.weights for layer in self._lora_layers]
        by_variant = find_token_counts_by_variant(
            ((each.a.shape[3], each.part_sizes) for each in weights),
            max_tokens=config.max_num_batched_tokens,
            max_loras=config.max_loras,
            max_rank=config.max_lora_rank,
            dtype=self._dtype,
            device=self._device,
            max_deferred=tuning_for(self._device).lora.appended.max_elements // config.max_lora_rank,
        )
        return sorted({*by_variant, *_list_powers_of_two(config.max_num_batched_tokens)})

    def run_adapters(self, tokens: int) -> None:
        """Run a prefill row of ``tokens`` tokens that have LoRA adapters."""
        inputs, attention = self._make_batch(0, tokens, shared=False)
        slots = torch.empty(tokens, dtype=torch.int32, device=self._device)
        self._pass.forward(inputs, attention, slots)

    def load_adapter(self) -> None:
        """Fill a LoRA slot."""
        fill_slot(0, torch.empty(16, dtype=torch.uint8, device=self._device), 0, 1, self._dtype)

    def _make_batch(
        self, decode_rows: int, tokens: int, *, shared: bool
    ) -> tuple[StepInputs, AttentionBatch]:
        lengths = np.array([1] * decode_rows + [tokens], dtype=np.int32)
        tables, count = self._tables, decode_rows + 1
        rows = torch.empty((4, count), dtype=torch.int32, device=self._device)
        inputs = prepare_inputs(
            rows,
            tables.tokens,
            tables.page_table,
            tables.page_size,
            total=int(lengths.sum()),
            max_len=tokens,
        )
        attention = AttentionBatch(
            starts=lengths,
            lengths=lengths,
            decode_rows=decode_rows,
            rows=rows,
            seq_lens=inputs.seq_lens,
            page_table=tables.page_table,
            block_table=None,
            shared_prefixes=self._shared_prefixes(decode_rows) if shared else None,
        )
        return inputs, attention

    def sum_messages(self) -> None:
        """Launch every kernel for sums over ranks: alone, fused with the norm, and around copies between two ranks."""
        for message in self._group.sample_messages(self._dtype):
            self._group.all_reduce(message)
        for norm in self._norms:
            for rows in self._group.sample_rows(len(norm.weight), self._dtype):
                norm.add_and_normalize(PartialSum(rows, self._group), rows)
        if self._group.tp_size == 1:
            return
        for norm in self._norms:  # behind sums that are not fused with it
            rows = torch.empty((2, len(norm.weight)), dtype=self._dtype, device=self._device)
            norm.add_and_normalize(rows, rows)
            if self._group.tp_size == EXCHANGE_RANKS:
                norm.add_and_normalize(ExchangedSum(rows, rows), rows)
        if self._group.tp_size == EXCHANGE_RANKS:
            self._group.launch_barrier()

    def run_without_peers(self) -> None:
        """Run one token as on GPUs without peer access, where no product is fused with its sum."""
        with self._group.without_peers():
            self.run_mixed(0, 1)

    def _shared_prefixes(self, rows: int) -> SharedPrefixes:
        """Allocate shared prefixes of ``rows`` rows."""
        return unpack_shared_prefixes(
            torch.empty(packed_size(rows), dtype=torch.int32, device=self._device), rows
        )

    def sample(self, logits: torch.Tensor, sampled: torch.Tensor) -> None:
        """Launch every kernel of the sampling pipeline for rows ``sampled`` int32[3, R] (index, slot, position)."""
        _, slots, positions = sampled
        self._sampler.draw(logits, slots, positions)
        whole = self._sampler.gather(logits)
        own = whole.float()
        # Filtered rows are sampled from the model's dtype, special ones from float32.
        for each in (whole, own):
            sample_tokens(each, slots, positions, *self._sampler.parameters)
        indices = torch.empty(len(slots), dtype=torch.int64, device=self._device)
        penalties = torch.empty((len(slots), 3), device=self._device)
        apply_penalties(own, indices, slots, positions, self._tables.tokens, indices, penalties, max_len=1)
        masks = torch.empty((len(slots), bitmask_words(own.shape[1])), dtype=torch.int32, device=self._device)
        apply_token_bitmask(own, indices, masks)
        for table in (self._tables.tokens, self._tables.page_table):
            write_cells(table, sampled)
        if self._tables.lora_slots is not None:
            write_cells(self._tables.lora_slots.view(-1, 1), sampled)
