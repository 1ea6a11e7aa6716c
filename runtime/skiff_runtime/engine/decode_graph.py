"""Steps of decode rows alone, on a GPU: the model, the sampler and the tables' upkeep as one CUDA graph.

A step's rows fill up to one of a few sizes with rows of nobody. Two columns go up, a graph is replayed, and the
tokens come down: nothing is allocated, nothing is waited for, and no request is looked at. Without graphs the
very same work is launched kernel by kernel, for the same sizes, so the tokens are the same. Where rows share enough of
their prefixes, the step is one of a second kind, that reads these once, with fewer sizes and its own graphs.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from skiff_runtime.attention.base import AttentionBatch
from skiff_runtime.engine.forward_pass import ForwardPass
from skiff_runtime.engine.input_batch import SampledRows, SlotTables
from skiff_runtime.engine.sampler import Sampler
from skiff_runtime.kernels.inputs import prepare_decode_inputs
from skiff_runtime.kernels.sampling import choose
from skiff_runtime.kernels.shared_prefixes import packed_size, unpack
from skiff_runtime.kernels.step_inputs import empty_step_inputs
from skiff_runtime.step import Int32, StepPlan

MAX_ROWS: Final = 512
"""Larger steps are computed like mixed ones: launching their kernels takes less time than they do."""
MIN_SHARED_ROWS: Final = 16

Kind = tuple[int, bool]
"""A size, and whether prefixes are shared."""


def decode_capture_sizes(rows: int) -> list[int]:
    """Sizes that steps of up to ``rows`` rows are filled up to: powers of two, then steps of 8, 16 and 32."""
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, MAX_ROWS, 32), MAX_ROWS]
    limit = min(rows, MAX_ROWS)
    return [*(size for size in steps if size < limit), limit]


def shared_prefix_capture_sizes(sizes: list[int]) -> list[int]:
    """Those of ``sizes`` that steps with shared prefixes fill up to."""
    return [size for size in sizes if size % 32 == 0 or size in (MIN_SHARED_ROWS, sizes[-1])]


class DecodeGraphRunner:
    """The tensors that stay where graphs find them, and the graphs."""

    def __init__(self, forward_pass: ForwardPass, tables: SlotTables, sampler: Sampler, *, rows: int) -> None:
        """For steps of up to ``rows`` rows."""
        self._pass = forward_pass
        self._tables = tables
        self._sampler = sampler
        self.sizes = decode_capture_sizes(rows)
        largest = self.sizes[-1]
        self.kinds = [(size, False) for size in self.sizes]
        if tables.prefixes is not None and largest >= MIN_SHARED_ROWS:
            self.kinds += [(size, True) for size in shared_prefix_capture_sizes(self.sizes)]
        self._size_of = {
            shared: _sizes_of([size for size, kind in self.kinds if kind is shared], largest)
            for shared in (False, True)
        }
        self._columns = torch.empty(
            2 * largest + packed_size(largest), dtype=torch.int32, device=forward_pass.device
        )
        self._inputs = empty_step_inputs(largest, largest, forward_pass.device)
        self._logits = forward_pass.empty_logits(largest)
        """Of any step: graphs that each kept their own would hold a gigabyte, with 256 rows of 150,000 tokens."""
        self._graphs: dict[Kind, torch.cuda.CUDAGraph] = {}
        self._results: dict[Kind, tuple[torch.Tensor, torch.Tensor]] = {}
        self._memory: Any = None

    def fits(self, plan: StepPlan) -> bool:
        """Whether the step can be run here: it has decode rows alone, and not too many."""
        return plan.decode_rows == len(plan.slots) <= self.sizes[-1]

    def run(self, plan: StepPlan) -> tuple[SampledRows, torch.Tensor, torch.Tensor]:
        """The rows, their logits [S, vocab], and tokens int32[S], chosen from these logits as they are.

        These tokens stand in the table already. All is overwritten by the next step.
        """
        count = len(plan.slots)
        prefixes = self._prefixes(plan)
        size = int(self._size_of[prefixes is not None][count])
        kind = size, prefixes is not None
        self._send(plan.slots, plan.starts, size, prefixes)
        graph = self._graphs.get(kind)
        if graph is None:
            logits, tokens = self._compute(*kind)
        else:
            graph.replay()
            logits, tokens = self._results[kind]
        rows = SampledRows(
            slots=self._columns[:count],
            positions=self._inputs.contexts[:count],
            host_slots=plan.slots,
            host_positions=plan.starts + 1,
        )
        return rows, logits[:count], tokens[:count]

    def captures(self) -> list[Callable[[], None]]:
        """What makes the graphs, the largest first; on one stream, which must not be the default one."""
        return [partial(self._capture, *kind) for kind in sorted(self.kinds, reverse=True)]

    def _capture(self, size: int, shared: bool) -> None:
        nothing = np.empty(0, np.int32)
        self._send(nothing, nothing, size, np.zeros(packed_size(size), np.int32) if shared else None)
        self._compute(size, shared)  # compiles, and lets libraries set up what they may not under capture
        torch.cuda.current_stream().synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")
        self._results[size, shared] = self._compute(size, shared)
        graph.capture_end()
        self._memory = graph.pool()
        self._graphs[size, shared] = graph

    def _prefixes(self, plan: StepPlan) -> Int32 | None:
        """What the rows share, packed; None where nothing, or too little."""
        count, prefixes = len(plan.slots), self._tables.prefixes
        if prefixes is None or not MIN_SHARED_ROWS // 2 < count < len(self._size_of[True]):
            return None
        return prefixes.find(plan.slots, plan.starts, int(self._size_of[True][count]))

    def _send(self, slots: Int32, starts: Int32, size: int, prefixes: Int32 | None) -> None:
        columns = np.empty((2, size), np.int32)
        columns[0, : len(slots)], columns[0, len(slots) :] = slots, self._tables.nobody
        columns[1, : len(slots)], columns[1, len(slots) :] = starts, 0
        numbers = columns.ravel() if prefixes is None else np.concatenate((columns.ravel(), prefixes))
        self._tables.staging.send(numbers, self._columns[: len(numbers)])

    @torch.inference_mode()
    def _compute(self, size: int, shared: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and tokens of the rows that were sent."""
        tables = self._tables
        rows, made = self._columns[: 2 * size].view(2, size), self._inputs.first(size)
        block_table = None if tables.block_table is None else tables.block_table[:size]
        prepare_decode_inputs(rows, tables.tokens, tables.pages, tables.page_size, made, block_table)
        ones = np.ones(size, np.int32)
        attention = AttentionBatch(
            starts=ones,
            lengths=ones,
            decode_rows=size,
            rows=rows,
            contexts=made.contexts,
            page_table=tables.pages,
            block_table=block_table,
            shared=unpack(self._columns[2 * size :][: packed_size(size)], size) if shared else None,
        )
        hidden = self._pass.forward(made, attention)
        logits = self._pass.logits(hidden.at(slice(None)), self._logits[:size])
        tokens = choose(logits, rows[0], made.contexts, *self._sampler.parameters, history=tables.tokens)
        return logits, tokens


def _sizes_of(sizes: list[int], largest: int) -> NDArray[np.int32]:
    """The least of ``sizes`` for each number of rows up to the largest."""
    return np.array(sizes, np.int32)[np.searchsorted(sizes, np.arange(largest + 1 if sizes else 0))]
