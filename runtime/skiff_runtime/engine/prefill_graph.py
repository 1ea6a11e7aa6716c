"""Steps with chunks of prompts, on a GPU: what lies between the attention of two layers is one CUDA graph each.

Such a step launches some four hundred kernels, and for a host that launches them one by one a short chunk takes as long
as a thousand tokens. Attention, which depends on the lengths of all rows, is launched between the graphs. The step's
tokens fill up to one of a few sizes with tokens of nobody; without graphs the very same work is launched kernel by
kernel, for the same sizes, so the tokens are the same.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np
import torch

from skiff_runtime.attention.base import AttentionBackend, AttentionBatch
from skiff_runtime.engine.forward_pass import HiddenStates
from skiff_runtime.engine.input_batch import InputBatch
from skiff_runtime.engine.model_runner import ModelRunner
from skiff_runtime.kernels.step_inputs import empty_step_inputs
from skiff_runtime.step import StepPlan

SIZES: Final = (*range(64, 1024, 64), *range(1024, 2048, 128), *range(2048, 4096, 512), 4096)
"""Larger steps keep a GPU busy for longer than their launches take."""


def prefill_capture_sizes(tokens: int) -> list[int]:
    """Sizes that steps of up to ``tokens`` tokens are filled up to."""
    limit = min(tokens, SIZES[-1])
    return [*(size for size in SIZES if size < limit), limit]


class PrefillGraphRunner:
    """The tensors that stay where graphs find them, and the graphs."""

    def __init__(self, runner: ModelRunner, *, tokens: int) -> None:
        """For steps of up to ``tokens`` tokens."""
        self._runner = runner
        self.sizes = prefill_capture_sizes(tokens)
        self._size_of = np.searchsorted(self.sizes, np.arange(self.sizes[-1] + 1))
        largest = self.sizes[-1]
        self._inputs = empty_step_inputs(largest, 1, runner.device)
        self.queries, self.attended = (runner.room(largest, *runner.query_shape) for _ in range(2))
        self._hidden = HiddenStates(*(runner.room(largest, runner.hidden_size) for _ in range(2)))
        self._graphs: dict[int, list[torch.cuda.CUDAGraph]] = {}
        self._memory: Any = None

    def fits(self, plan: StepPlan) -> bool:
        """Whether the step can be run here."""
        return plan.tokens <= self.sizes[-1]

    def run(self, batch: InputBatch) -> HiddenStates:
        """Compute a step of T tokens as ``ForwardPass.forward`` does; what it returns is overwritten by the next."""
        made = batch.tokens
        count = len(made.token_ids)
        size = self.sizes[int(self._size_of[count])]
        self._inputs.token_ids[:count].copy_(made.token_ids)
        self._inputs.positions[:count].copy_(made.positions)
        self._inputs.slot_mapping[:count].copy_(made.slot_mapping)
        self._inputs.slot_mapping[count:size].fill_(-1)
        backend = self._runner.backend
        backend.prepare(batch.attention)
        graphs = self._graphs.get(size)
        if graphs is None:
            self._compute(size, _Padded(backend, self, size, count))
        else:
            *before, last = graphs
            queries, attended = self.queries[:count], self.attended[:count]
            for layer, graph in enumerate(before):
                graph.replay()
                backend.forward(layer, queries, attended)
            last.replay()
        return HiddenStates(self._hidden.output[:count], self._hidden.residual[:count])

    def captures(self) -> list[Callable[[], None]]:
        """What makes the graphs, the largest first; on one stream, which must not be the default one."""
        return [partial(self._capture, size) for size in sorted(self.sizes, reverse=True)]

    @torch.inference_mode()
    def _capture(self, size: int) -> None:
        self._inputs.slot_mapping.fill_(-1)
        # Compiles, and lets libraries set up what they may not under capture.
        self._compute(size, _Padded(self._runner.backend, self, size, 0))
        torch.cuda.current_stream().synchronize()
        pieces = _Pieces(self._runner.backend, self, size, self._memory)
        pieces.begin()
        self._compute(size, pieces)
        pieces.end()
        self._memory = pieces.memory
        self._graphs[size] = pieces.graphs

    def _compute(self, size: int, backend: AttentionBackend) -> None:
        made = self._runner.compute(self._inputs.first(size), backend)
        self._hidden.output[:size].copy_(made.output)
        self._hidden.residual[:size].copy_(made.residual)


class _Padded(AttentionBackend):
    """Attends for the first ``count`` of ``size`` tokens by ``backend``, which is prepared for these."""

    def __init__(self, backend: AttentionBackend, step: PrefillGraphRunner, size: int, count: int) -> None:
        super().__init__(backend.pool)
        self._backend = backend
        self._step = step
        self._size = size
        self._count = count

    def prepare(self, batch: AttentionBatch) -> None:
        self._backend.prepare(batch)

    def forward(self, layer: int, q: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        assert into is None, "what a model attends to is read from the step's own tensor"
        step, count = self._step, self._count
        step.queries[: self._size].copy_(q)
        if count:
            self._backend.forward(layer, step.queries[:count], step.attended[:count])
        return step.attended[: self._size]


class _Pieces(_Padded):
    """Ends a graph where attention would begin, and begins the next one behind it."""

    def __init__(self, backend: AttentionBackend, step: PrefillGraphRunner, size: int, memory: Any) -> None:
        super().__init__(backend, step, size, 0)
        self.memory = memory
        self.graphs: list[torch.cuda.CUDAGraph] = []

    def forward(self, layer: int, q: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        attended = super().forward(layer, q, into)
        self.end()
        self.begin()
        return attended

    def begin(self) -> None:
        """Capture from here on."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self.memory, capture_error_mode="thread_local")
        self.graphs.append(graph)

    def end(self) -> None:
        """What was captured is one graph."""
        self.graphs[-1].capture_end()
        self.memory = self.graphs[-1].pool()
