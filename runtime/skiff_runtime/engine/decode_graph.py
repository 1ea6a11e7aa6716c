"""Decode graphs: a step of decode rows alone, on a GPU, as one CUDA graph of model, sampler and the tables' update.

With tensor parallelism the graph exchanges one sampling key a row, and rows with filters are sampled again after it.

The rows are padded to one of a few sizes. A step copies two short columns to the device, replays a graph, and copies
the tokens back: nothing is allocated, nothing is waited for, and no request is looked at. Without graphs the same work
is launched kernel by kernel, padded to the same sizes, so the tokens are the same. Where rows share enough of their
prefixes, the step is of a second kind, which reads these once and has fewer sizes and graphs of its own.
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
from skiff_runtime.kernels.prepare_inputs import prepare_decode_inputs
from skiff_runtime.kernels.shared_prefixes import packed_size, unpack_shared_prefixes
from skiff_runtime.kernels.step_inputs import empty_step_inputs
from skiff_runtime.kernels.tuning import tuning_for
from skiff_runtime.step import Int32, StepPlan

MAX_GRAPH_ROWS: Final = 512
"""Larger steps are computed like mixed batches: launching their kernels takes less time than the kernels do."""

GraphKey = tuple[int, bool]
"""(Padded number of rows, rows share prefixes)."""


def decode_capture_sizes(rows: int) -> list[int]:
    """Return the sizes to which steps of up to ``rows`` rows are padded: powers of two, then steps of 8, 16 and 32."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, MAX_GRAPH_ROWS, 32), MAX_GRAPH_ROWS]
    limit = min(rows, MAX_GRAPH_ROWS)
    return [*(size for size in sizes if size < limit), limit]


def shared_prefix_capture_sizes(sizes: list[int], min_rows: int) -> list[int]:
    """Return those of ``sizes`` to which steps with shared prefixes are padded; ``min_rows`` is the smallest one."""
    return [size for size in sizes if size % 32 == 0 or size in (min_rows, sizes[-1])]


class DecodeGraphRunner:
    """The decode graphs, and the tensors that stay at the addresses from which they read."""

    def __init__(self, forward_pass: ForwardPass, tables: SlotTables, sampler: Sampler, *, rows: int) -> None:
        """Allocate for steps of up to ``rows`` rows."""
        self._pass = forward_pass
        self._tables = tables
        self._sampler = sampler
        self.sizes = decode_capture_sizes(rows)
        largest = self.sizes[-1]
        self.graph_keys = [(size, False) for size in self.sizes]
        self._min_shared_rows = tuning_for(forward_pass.device).shared_prefix.min_rows
        if tables.shared_prefix is not None and largest >= self._min_shared_rows:
            sizes = shared_prefix_capture_sizes(self.sizes, self._min_shared_rows)
            self.graph_keys += [(size, True) for size in sizes]
        self._padded_size = {
            shared: _padded_sizes([size for size, kind in self.graph_keys if kind is shared], largest)
            for shared in (False, True)
        }
        self._columns = torch.empty(
            2 * largest + packed_size(largest), dtype=torch.int32, device=forward_pass.device
        )
        self._inputs = empty_step_inputs(largest, largest, forward_pass.device)
        self._logits = forward_pass.empty_logits(largest)
        """Shared by all graphs: with 256 rows of a vocabulary of 150,000, separate buffers would take a gigabyte."""
        self._graphs: dict[GraphKey, torch.cuda.CUDAGraph] = {}
        self._results: dict[GraphKey, tuple[torch.Tensor, torch.Tensor]] = {}
        self._memory_pool: Any = None

    def can_run(self, plan: StepPlan) -> bool:
        """Return whether the step has decode rows alone, and not too many."""
        return plan.decode_rows == len(plan.slots) <= self.sizes[-1]

    def run(self, plan: StepPlan) -> tuple[SampledRows, torch.Tensor, torch.Tensor]:
        """Run a step; return its rows, this rank's logits [S, shard], and tokens int32[S] drawn from unprocessed logits.

        The tokens are in the token table already. The next step overwrites all results.
        """
        count = len(plan.slots)
        prefixes = self._find_prefixes(plan)
        size = int(self._padded_size[prefixes is not None][count])
        key = size, prefixes is not None
        self._send(plan.slots, plan.starts, size, prefixes)
        graph = self._graphs.get(key)
        if graph is None:
            logits, tokens = self._compute(*key)
        else:
            graph.replay()
            logits, tokens = self._results[key]
        rows = SampledRows(
            slots=self._columns[:count],
            positions=self._inputs.seq_lens[:count],
            host_slots=plan.slots,
            host_positions=plan.starts + 1,
        )
        return rows, logits[:count], tokens[:count]

    def capture_tasks(self) -> list[Callable[[], None]]:
        """Return the tasks that capture the graphs, the largest first.

        All of them must run on one stream, which must not be the default one. The largest comes first because the
        others then fit into its memory.
        """
        return [partial(self._capture, *key) for key in sorted(self.graph_keys, reverse=True)]

    def _capture(self, size: int, shared: bool) -> None:
        no_rows = np.empty(0, np.int32)
        self._send(no_rows, no_rows, size, np.zeros(packed_size(size), np.int32) if shared else None)
        self._compute(size, shared)  # compiles, and lets libraries set up what they must not under capture
        torch.cuda.current_stream().synchronize()
        graph = torch.cuda.CUDAGraph()
        # "thread_local": other threads, such as NCCL's watchdog, may call CUDA during the capture.
        graph.capture_begin(pool=self._memory_pool, capture_error_mode="thread_local")
        self._results[size, shared] = self._compute(size, shared)
        graph.capture_end()
        self._memory_pool = graph.pool()
        self._graphs[size, shared] = graph

    def _find_prefixes(self, plan: StepPlan) -> Int32 | None:
        """Return the rows' shared prefixes, packed; None if sharing is not profitable."""
        count, finder = len(plan.slots), self._tables.shared_prefix
        if finder is None or not self._min_shared_rows // 2 < count < len(self._padded_size[True]):
            return None
        return finder.find(plan.slots, plan.starts, int(self._padded_size[True][count]))

    def _send(self, slots: Int32, starts: Int32, size: int, prefixes: Int32 | None) -> None:
        """Copy slots and starts, padded with the padding slot, and the packed prefixes to the device in one copy."""
        columns = np.empty((2, size), np.int32)
        columns[0, : len(slots)], columns[0, len(slots) :] = slots, self._tables.padding_slot
        columns[1, : len(slots)], columns[1, len(slots) :] = starts, 0
        numbers = columns.ravel() if prefixes is None else np.concatenate((columns.ravel(), prefixes))
        self._tables.staging.send(numbers, self._columns[: len(numbers)])

    @torch.inference_mode()
    def _compute(self, size: int, shared: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute logits and tokens of the rows that were sent; this is the work that a graph captures."""
        tables = self._tables
        rows, inputs = self._columns[: 2 * size].view(2, size), self._inputs.first_rows(size)
        block_table = None if tables.block_table is None else tables.block_table[:size]
        prepare_decode_inputs(rows, tables.tokens, tables.page_table, tables.page_size, inputs, block_table)
        ones = np.ones(size, np.int32)
        attention = AttentionBatch(
            starts=ones,
            lengths=ones,
            decode_rows=size,
            rows=rows,
            seq_lens=inputs.seq_lens,
            page_table=tables.page_table,
            block_table=block_table,
            shared_prefixes=unpack_shared_prefixes(self._columns[2 * size :][: packed_size(size)], size)
            if shared
            else None,
        )
        hidden = self._pass.forward(inputs, attention)
        logits = self._pass.logits(hidden, self._logits[:size])
        tokens = self._sampler.draw(logits, rows[0], inputs.seq_lens, tables.tokens)
        return logits, tokens


def _padded_sizes(sizes: list[int], largest: int) -> NDArray[np.int32]:
    """Return the smallest of ``sizes`` that holds each number of rows, 0 to ``largest``; empty without sizes."""
    return np.array(sizes, np.int32)[np.searchsorted(sizes, np.arange(largest + 1 if sizes else 0))]
