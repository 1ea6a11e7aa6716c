"""Decode graphs: a step of decode rows alone, on a GPU, as one CUDA graph of model, sampler and the tables' update.

The rows are padded to one of a few sizes. A step copies two short columns to the device, replays a graph, and copies
the tokens back: nothing is allocated, nothing is waited for, and no request is looked at. Without graphs the same work
is launched kernel by kernel, padded to the same sizes, so the tokens are the same. Where rows share enough of their
prefixes, the step is of a second kind, which reads these once and has fewer sizes and graphs of its own. With LoRA there are
graphs of both kinds for steps with adapters, too, so a step without any launches the same kernels as without LoRA.

With tensor parallelism the graph ends with this rank's shard of the logits, and up to two small graphs follow it: a
draw for all rows, which exchanges one key a row, and one for the rows whose filters need whole logits, padded to a size
of its own. The host chooses them by what the rows request, which is the same on every rank.
"""

from functools import partial
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from skiff_runtime.attention.base import AttentionBatch
from skiff_runtime.engine.capture_stream import capture_stream
from skiff_runtime.engine.forward_pass import ForwardPass
from skiff_runtime.engine.graph_captures import CaptureTask
from skiff_runtime.engine.graph_memory import NO_GRAPH_MEMORY, GraphMemory
from skiff_runtime.engine.input_batch import SampledRows, SlotTables
from skiff_runtime.engine.sampler import Sampler
from skiff_runtime.kernels.prepare_inputs import prepare_decode_inputs, write_cells
from skiff_runtime.kernels.shared_prefixes import packed_size, unpack_shared_prefixes
from skiff_runtime.kernels.step_inputs import empty_step_inputs
from skiff_runtime.kernels.tuning import tuning_for
from skiff_runtime.step import Int32, StepPlan

MAX_GRAPH_ROWS: Final = 512
"""Larger steps are computed like mixed batches: launching their kernels takes less time than the kernels do."""

GraphKey = tuple[int, bool, bool]
"""(Padded number of rows, rows share prefixes, rows have adapters)."""


class GraphPart(NamedTuple):
    """One graph of a step: ``model`` (with one rank also the draw), ``draw``, or ``draw_whole`` for filtered rows."""

    kind: Literal["model", "draw", "draw_whole"]
    size: int
    """The padded number of rows."""
    shared: bool = False
    """True if rows share prefixes."""
    lora: bool = False
    """True if rows have LoRA adapters."""


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
        kinds = (False,) if tables.lora_slots is None else (False, True)
        self.graph_keys = [(size, False, lora) for size in self.sizes for lora in kinds]
        self._min_shared_rows = tuning_for(forward_pass.device).shared_prefix.min_rows
        if tables.shared_prefix is not None and largest >= self._min_shared_rows:
            sizes = shared_prefix_capture_sizes(self.sizes, self._min_shared_rows)
            self.graph_keys += [(size, True, lora) for size in sizes for lora in kinds]
        self._padded_size = {
            shared: _padded_sizes(
                [size for size, kind, lora in self.graph_keys if kind is shared and not lora], largest
            )
            for shared in (False, True)
        }
        self._columns = torch.empty(
            2 * largest + packed_size(largest), dtype=torch.int32, device=forward_pass.device
        )
        self._inputs = empty_step_inputs(largest, largest, forward_pass.device)
        self._largest = largest
        self._logits = forward_pass.empty_logits(largest + sampler.is_sharded)
        """Shared by all graphs: with 256 rows of a vocabulary of 150,000, separate buffers would take a gigabyte. With
        tensor parallelism the last one is a padding row of the filtered rows."""
        self._filtered_columns = torch.empty(3 * largest, dtype=torch.int32, device=forward_pass.device)
        self._tokens = torch.zeros(largest + 1, dtype=torch.int32, device=forward_pass.device)
        """With tensor parallelism, the tokens of both draws; the last one is of the padding row."""
        self._graphs: dict[GraphPart, torch.cuda.CUDAGraph] = {}
        self._results: dict[GraphPart, torch.Tensor] = {}
        self._memory_pool: Any = None

    def can_run(self, plan: StepPlan) -> bool:
        """Return whether the step has decode rows alone, and not too many."""
        return plan.decode_rows == len(plan.slots) <= self.sizes[-1]

    def run(
        self, plan: StepPlan, filtered: NDArray[np.int64]
    ) -> tuple[SampledRows, torch.Tensor, torch.Tensor]:
        """Run a step; return its rows, this rank's logits [S, shard], and tokens int32[S] drawn from unprocessed logits.

        ``filtered`` are the rows that must be made whole, none with one rank. The tokens are in the token table
        already. The next step overwrites all results.
        """
        count = len(plan.slots)
        prefixes = self._find_prefixes(plan)
        size = int(self._padded_size[prefixes is not None][count])
        self._send(plan.slots, plan.starts, size, prefixes)
        lora = self._tables.has_adapters(plan.slots)
        tokens = self._run(GraphPart("model", size, prefixes is not None, lora))
        if self._sampler.is_sharded and len(filtered) < count:
            tokens = self._run(GraphPart("draw", size))
        if len(filtered):
            padded = int(self._padded_size[False][len(filtered)])
            self._send_filtered(filtered, plan.slots[filtered], plan.starts[filtered] + 1, padded)
            tokens = self._run(GraphPart("draw_whole", padded))
        rows = SampledRows(
            slots=self._columns[:count],
            positions=self._inputs.seq_lens[:count],
            host_slots=plan.slots,
            host_positions=plan.starts + 1,
        )
        return rows, self._logits[:count], tokens[:count]

    def parts(self, size: int, shared: bool, lora: bool) -> list[GraphPart]:
        """Return the model's part of the steps of one of ``graph_keys``, and with it each draw of this size once.

        ``draw_whole``, which takes memory, is in the first task of its size: the memory profile counts all tasks but
        the first like the second.
        """
        parts = [GraphPart("model", size, shared, lora)]
        if self._sampler.is_sharded and not shared and not lora:
            parts.append(GraphPart("draw", size))
        first = max(key for key in self.graph_keys if key[0] == size)
        if self._sampler.is_sharded and (size, shared, lora) == first:
            parts.append(GraphPart("draw_whole", size))
        return parts

    def capture_tasks(self, memory: GraphMemory = NO_GRAPH_MEMORY) -> list[CaptureTask]:
        """Return the tasks that capture the graphs, the largest first; they need the profiled ``memory``.

        The largest must run first, because the others then fit into its memory.
        """
        keys = sorted(self.graph_keys, reverse=True)
        return [
            CaptureTask(key[0], partial(self._capture, *key), memory.further if at else memory.largest)
            for at, key in enumerate(keys)
        ]

    def release_graphs(self) -> None:
        """Release all graphs and their memory; steps then launch their kernels one by one."""
        self._results.clear()
        self._graphs.clear()
        self._memory_pool = None
        torch.cuda.empty_cache()

    def _capture(self, size: int, shared: bool, lora: bool) -> None:
        no_rows = np.empty(0, np.int32)
        self._send(no_rows, no_rows, size, np.zeros(packed_size(size), np.int32) if shared else None)
        self._send_filtered(no_rows, no_rows, no_rows, size)
        for part in self.parts(size, shared, lora):
            self.compute(part)  # compiles, and lets libraries set up what they must not under capture
            torch.cuda.current_stream().synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(capture_stream(self._pass.device)):
                # "thread_local": other threads, such as NCCL's watchdog, may call CUDA during the capture.
                graph.capture_begin(pool=self._memory_pool, capture_error_mode="thread_local")
                self._results[part] = self.compute(part)
                graph.capture_end()
            self._memory_pool = graph.pool()
            self._graphs[part] = graph

    def _run(self, part: GraphPart) -> torch.Tensor:
        """Replay the part's graph, or launch its kernels one by one where there is none; return its result."""
        graph = self._graphs.get(part)
        if graph is None:
            return self.compute(part)
        graph.replay()
        return self._results[part]

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

    def _send_filtered(self, filtered: NDArray[Any], slots: Int32, positions: Int32, size: int) -> None:
        """Copy indices, slots and positions of the filtered rows to the device, padded with the padding slot."""
        columns = np.empty((3, size), np.int32)
        for column, values, padding in zip(
            columns, (filtered, slots, positions), (self._largest, self._tables.padding_slot, 0), strict=True
        ):
            column[: len(values)], column[len(values) :] = values, padding
        self._tables.staging.send(columns.ravel(), self._filtered_columns[: columns.size])

    @torch.inference_mode()
    def compute(self, part: GraphPart) -> torch.Tensor:
        """Compute a part from the rows that were sent; this is the work that its graph captures.

        Returns the tokens, int32, of the step's rows and perhaps more; of a ``model`` without a draw, the logits.
        """
        if part.kind == "model":
            return self._compute_model(part.size, part.shared, lora=part.lora)
        if part.kind == "draw":
            self._tokens[: part.size].copy_(self._draw(part.size))
        else:
            self._draw_whole(part.size)
        return self._tokens

    def _compute_model(self, size: int, shared: bool, *, lora: bool) -> torch.Tensor:
        """Compute the logits of the rows that were sent, and with one rank draw their tokens int32 [size]."""
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
        lora_slots = None
        if lora:
            assert tables.lora_slots is not None
            lora_slots = tables.lora_slots.index_select(0, rows[0])
        hidden = self._pass.forward(inputs, attention, lora_slots)
        logits = self._pass.logits(hidden, self._logits[:size])
        return logits if self._sampler.is_sharded else self._draw(size)

    def _draw(self, size: int) -> torch.Tensor:
        """Draw tokens int32 [size] for all rows, and write them to the table."""
        slots, positions = self._columns[:size], self._inputs.seq_lens[:size]
        return self._sampler.draw(self._logits[:size], slots, positions, self._tables.tokens)

    def _draw_whole(self, size: int) -> None:
        """Draw the tokens of the filtered rows, from whole logits, and write them to their places and to the table."""
        indices, slots, positions = self._filtered_columns[: 3 * size].view(3, size)
        tokens = self._sampler.draw_whole(self._logits.index_select(0, indices), slots, positions).int()
        write_cells(self._tables.tokens, torch.stack((slots, positions, tokens.clamp(min=0))))
        self._tokens.index_copy_(0, indices.long(), tokens)


def _padded_sizes(sizes: list[int], largest: int) -> NDArray[np.int32]:
    """Return the smallest of ``sizes`` that holds each number of rows, 0 to ``largest``; empty without sizes."""
    return np.array(sizes, np.int32)[np.searchsorted(sizes, np.arange(largest + 1 if sizes else 0))]
