"""Steps of a model on tensors that are not there, which compile every Triton kernel that the real ones launch.

It needs no GPU: tensors are fake ones of torch, so that nothing but shapes, types and alignment is computed, and
Triton's driver is one that compiles for the architecture it is told of, and launches nothing.
"""

from typing import Final

import numpy as np
import torch

from skiff_runtime.attention.base import AttentionBatch
from skiff_runtime.attention.hybrid import HybridAttention, TritonDecode, TritonPrefill
from skiff_runtime.config import Config
from skiff_runtime.distributed.tensor_parallel import DetachedRank
from skiff_runtime.engine.decode_graph import DecodeGraphRunner
from skiff_runtime.engine.forward_pass import ForwardPass
from skiff_runtime.engine.input_batch import SlotTables
from skiff_runtime.engine.model_runner import kv_layout, longest, make_layer_context
from skiff_runtime.engine.sampler import Sampler
from skiff_runtime.kernels.inputs import step_inputs
from skiff_runtime.kernels.penalties import apply_penalties
from skiff_runtime.kernels.sampling import choose
from skiff_runtime.kernels.shared_prefixes import SharedPrefixes, packed_size, unpack
from skiff_runtime.kernels.token_bitmask import apply_token_bitmask, bitmask_words
from skiff_runtime.kernels.torch_internals import FakeTensorMode
from skiff_runtime.kernels.triton.attention.decode_launch import find_row_counts_by_variant
from skiff_runtime.kernels.triton.runtime.cache_keys import compute_cache_keys
from skiff_runtime.kernels.triton.runtime.compilation_log import log_compilations
from skiff_runtime.kernels.triton.step_inputs import gather_pages, write_cells
from skiff_runtime.kvcache.kv_pool import KVPool
from skiff_runtime.models.config import ModelConfig
from skiff_runtime.models.registry import make_model
from skiff_runtime.prebuild.offline_driver import LaunchSignature, compiling

MIXED: Final = ((0, 16), (0, 17), (2, 33), (16, 64))
"""Steps of so many decode rows and a chunk of so many tokens, beside those of ``MIXED_CHUNK``."""
MIXED_CHUNK: Final = 16
"""Tokens beside each number of decode rows that has kernels of its own, a single one among them."""


def compile_ahead_of_time(config: Config, model: ModelConfig, architecture: int) -> list[LaunchSignature]:
    """Compile what a rank of this resolved configuration launches, for compute capability ``architecture`` (90: 9.0); tell it.

    That is rank 0 of its ``tp``: shares are of one size on all ranks, so the others launch the same.
    """
    compute_cache_keys()
    log_compilations()
    with compiling(architecture) as gpu, FakeTensorMode(), torch.inference_mode():
        stage = _Stage(config, model)
        for kind in stage.decode.kinds:
            stage.decode._compute(*kind)
        for decode_rows, chunk in MIXED:
            stage.mix(min(decode_rows, config.running_limit), chunk)
        for shared in (False, True):
            for decode_rows in stage.find_row_counts_by_variant(shared=shared):
                stage.mix(decode_rows, MIXED_CHUNK, shared=shared)
        return gpu.launched


class _Stage:
    """A rank's model, its cache and its tables, all fake."""

    def __init__(self, config: Config, model: ModelConfig) -> None:
        self._device = torch.device("cuda", 0)
        context, ranks = longest(config, model), config.tp_size
        placement = make_layer_context(config, model, DetachedRank(0, ranks, self._device))
        built = make_model(model, placement, max_positions=context)
        layout = kv_layout(config, built, placement.dtype, ranks=ranks)
        pool = KVPool(layout, 1, self._device)
        decode = TritonDecode(pool, built.heads.local_query_heads(ranks), context)
        backend = HybridAttention(pool, TritonPrefill(pool), decode)
        self._pass = ForwardPass(built, backend, self._device)
        self._shape = (
            config.running_limit,
            layout.kv_heads,
            context,
            placement.dtype,
            layout.dtype,
            model.head_dim,
        )
        self._tables = SlotTables(config.max_running_requests, context, config.page_size, torch.device("cpu"))
        self._tables.enable_shared_prefix(0 if config.disable_cascade_attn else backend.shared_prefix_rows)
        self._sampler = Sampler(self._tables.nobody + 1, torch.device("cpu"))
        self.decode = DecodeGraphRunner(self._pass, self._tables, self._sampler, rows=config.running_limit)

    def find_row_counts_by_variant(self, *, shared: bool) -> list[int]:
        """Numbers of decode rows that launch all kernels of mixed steps, with ``shared`` prefixes or none."""
        if shared and self._tables.prefixes is None:
            return []
        return find_row_counts_by_variant(*self._shape, shared=shared)

    def mix(self, decode_rows: int, chunk: int, *, shared: bool = False) -> None:
        """A step of decode rows and one chunk of a prompt."""
        lengths = np.array([1] * decode_rows + [chunk], dtype=np.int32)
        tables, count = self._tables, decode_rows + 1
        rows = torch.empty((4, count), dtype=torch.int32, device=self._device)
        made = step_inputs(
            rows, tables.tokens, tables.pages, tables.page_size, total=int(lengths.sum()), longest=chunk
        )
        attention = AttentionBatch(
            starts=lengths,
            lengths=lengths,
            decode_rows=decode_rows,
            rows=rows,
            contexts=made.contexts,
            page_table=tables.pages,
            block_table=None,
            shared=self._prefixes(decode_rows) if shared else None,
        )
        sampled = torch.empty((3, count), dtype=torch.int32, device=self._device)
        logits = self._pass.logits(self._pass.forward_selected(made, attention, sampled[0]))
        self.choose(logits, sampled)
        gather_pages(tables.pages, rows[0, decode_rows:], rows[0], total=1)

    def _prefixes(self, rows: int) -> SharedPrefixes:
        """What so many rows might share."""
        return unpack(torch.empty(packed_size(rows), dtype=torch.int32, device=self._device), rows)

    def choose(self, logits: torch.Tensor, sampled: torch.Tensor) -> None:
        """Tokens of rows int32[3, R], from logits as they are, and as edits, grammars and log-probabilities want them."""
        _, slots, positions = sampled
        own = logits.float()
        for wide in (logits, own):
            choose(wide, slots, positions, *self._sampler.parameters)
        where = torch.empty(len(slots), dtype=torch.int64, device=self._device)
        penalties = torch.empty((len(slots), 3), device=self._device)
        apply_penalties(own, where, slots, positions, self._tables.tokens, where, penalties, longest=1)
        masks = torch.empty((len(slots), bitmask_words(own.shape[1])), dtype=torch.int32, device=self._device)
        apply_token_bitmask(own, where, masks)
        for table in (self._tables.tokens, self._tables.pages):
            write_cells(table, sampled)
