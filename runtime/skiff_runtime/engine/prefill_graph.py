"""Prefill graphs: steps with prefill rows, on a GPU, as piecewise CUDA graphs of everything between two attentions.

Such a step launches some four hundred kernels, and a host that launches them one by one takes as long for a short
chunk as for a thousand tokens. Attention, whose launch depends on the lengths of all rows, is launched between the
graphs. The tokens are padded to one of a few sizes. Without graphs the same work is launched kernel by kernel, padded
to the same sizes, so the tokens are the same.
"""

from functools import partial
from typing import Any, Final

import numpy as np
import torch

from skiff_runtime.attention.base import AttentionBackend, AttentionBatch
from skiff_runtime.engine.capture_stream import capture_stream
from skiff_runtime.engine.forward_pass import HiddenStates
from skiff_runtime.engine.graph_captures import CaptureTask
from skiff_runtime.engine.graph_memory import NO_GRAPH_MEMORY, GraphMemory
from skiff_runtime.engine.input_batch import InputBatch
from skiff_runtime.engine.model_runner import ModelRunner
from skiff_runtime.kernels.step_inputs import empty_step_inputs
from skiff_runtime.step import NO_LORA_SLOT, StepPlan

CAPTURE_SIZES: Final = (*range(64, 1024, 64), *range(1024, 2048, 128), *range(2048, 4096, 512), 4096)
"""Numbers of tokens. Larger steps keep a GPU busy for longer than their launches take."""


def prefill_capture_sizes(tokens: int) -> list[int]:
    """Return the sizes to which steps of up to ``tokens`` tokens are padded."""
    limit = min(tokens, CAPTURE_SIZES[-1])
    return [*(size for size in CAPTURE_SIZES if size < limit), limit]


class PrefillGraphRunner:
    """The prefill graphs, and the tensors that stay at the addresses from which they read."""

    def __init__(self, runner: ModelRunner, *, tokens: int) -> None:
        """Allocate for steps of up to ``tokens`` tokens."""
        self._runner = runner
        self.sizes = prefill_capture_sizes(tokens)
        self._padded_size = np.searchsorted(self.sizes, np.arange(self.sizes[-1] + 1))
        largest = self.sizes[-1]
        self._inputs = empty_step_inputs(largest, 1, runner.device)
        self._lora_slots = torch.full((largest,), NO_LORA_SLOT, dtype=torch.int32, device=runner.device)
        self._kinds = (False,) if runner.lora is None else (False, True)
        self.queries, self.attended = (runner.zeros(largest, *runner.query_shape) for _ in range(2))
        self._hidden = HiddenStates(*(runner.zeros(largest, runner.hidden_size) for _ in range(2)))
        self._graphs: dict[tuple[int, bool], list[torch.cuda.CUDAGraph]] = {}
        """By (padded number of tokens, tokens have adapters)."""
        self._memory_pool: Any = None

    def can_run(self, plan: StepPlan) -> bool:
        """Return whether the step has few enough tokens."""
        return plan.num_tokens <= self.sizes[-1]

    def run(self, batch: InputBatch) -> HiddenStates:
        """Compute a step of T tokens as ``ForwardPass.forward`` does; the next step overwrites the result."""
        inputs = batch.inputs
        count = len(inputs.token_ids)
        size = self.sizes[int(self._padded_size[count])]
        self._inputs.token_ids[:count].copy_(inputs.token_ids)
        self._inputs.positions[:count].copy_(inputs.positions)
        self._inputs.slot_mapping[:count].copy_(inputs.slot_mapping)
        self._inputs.slot_mapping[count:size].fill_(-1)  # K and V of padding tokens are not stored
        self._prepare_lora(batch.lora_slots, size)
        backend = self._runner.backend
        backend.prepare(batch.attention)
        graphs = self._graphs.get((size, batch.lora_slots is not None))
        if graphs is None:
            self._compute(size, _PaddedAttention(backend, self, size, count))
        else:
            *before, last = graphs
            queries, attended = self.queries[:count], self.attended[:count]
            for layer, graph in enumerate(before):
                graph.replay()
                backend.forward(layer, queries, attended)
            last.replay()
        return HiddenStates(self._hidden.output[:count], self._hidden.residual[:count])

    def capture_tasks(self, memory: GraphMemory = NO_GRAPH_MEMORY) -> list[CaptureTask]:
        """Return the tasks that capture the graphs, the largest first, as ``DecodeGraphRunner.capture_tasks`` does."""
        keys = sorted(((size, lora) for size in self.sizes for lora in self._kinds), reverse=True)
        return [
            CaptureTask(key[0], partial(self._capture, *key), memory.further if at else memory.largest)
            for at, key in enumerate(keys)
        ]

    def _prepare_lora(self, slots: torch.Tensor | None, size: int) -> None:
        """Map the LoRA slots of a step's tokens, outside of the graphs, and of the padding tokens up to ``size``."""
        if slots is None:
            self._runner.prepare_lora(None)
            return
        self._lora_slots[: len(slots)].copy_(slots)
        self._lora_slots[len(slots) : size].fill_(NO_LORA_SLOT)
        self._runner.prepare_lora(self._lora_slots[:size])

    @torch.inference_mode()
    def _capture(self, size: int, lora: bool) -> None:
        self._inputs.slot_mapping.fill_(-1)
        no_adapters = self._lora_slots[:0] if lora else None
        self._prepare_lora(no_adapters, size)
        # Compiles, and lets libraries set up what they must not under capture.
        self._compute(size, _PaddedAttention(self._runner.backend, self, size, 0))
        torch.cuda.current_stream().synchronize()
        self._prepare_lora(no_adapters, size)  # each mapping holds for one computation
        pieces = _PiecewiseCapture(self._runner.backend, self, size, self._memory_pool)
        with torch.cuda.stream(capture_stream(self._runner.device)):
            pieces.begin()
            self._compute(size, pieces)
            pieces.end()
        self._memory_pool = pieces.memory_pool
        self._graphs[size, lora] = pieces.graphs

    def _compute(self, size: int, backend: AttentionBackend) -> None:
        hidden = self._runner.forward_prepared(self._inputs.first_rows(size), backend)
        self._hidden.output[:size].copy_(hidden.output)
        self._hidden.residual[:size].copy_(hidden.residual)


class _PaddedAttention(AttentionBackend):
    """Attends for the first ``count`` of ``size`` tokens, by a ``backend`` that has been prepared for these."""

    def __init__(self, backend: AttentionBackend, runner: PrefillGraphRunner, size: int, count: int) -> None:
        super().__init__(backend.pool)
        self._backend = backend
        self._runner = runner
        self._size = size
        self._count = count

    def prepare(self, batch: AttentionBatch) -> None:
        self._backend.prepare(batch)

    def forward(self, layer: int, q: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        assert out is None, "the result is read from the runner's own tensor, whose address the graphs know"
        runner, count = self._runner, self._count
        runner.queries[: self._size].copy_(q)
        if count:
            self._backend.forward(layer, runner.queries[:count], runner.attended[:count])
        return runner.attended[: self._size]


class _PiecewiseCapture(_PaddedAttention):
    """Ends one graph where attention begins, and begins the next one after it."""

    def __init__(
        self, backend: AttentionBackend, runner: PrefillGraphRunner, size: int, memory_pool: Any
    ) -> None:
        super().__init__(backend, runner, size, 0)
        self.memory_pool = memory_pool
        self.graphs: list[torch.cuda.CUDAGraph] = []

    def forward(self, layer: int, q: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        attended = super().forward(layer, q, out)
        self.end()
        self.begin()
        return attended

    def begin(self) -> None:
        """Start to capture the next graph."""
        graph = torch.cuda.CUDAGraph()
        # "thread_local" as in ``DecodeGraphRunner._capture``.
        graph.capture_begin(pool=self.memory_pool, capture_error_mode="thread_local")
        self.graphs.append(graph)

    def end(self) -> None:
        """End the capture of the current graph."""
        self.graphs[-1].capture_end()
        self.memory_pool = self.graphs[-1].pool()
