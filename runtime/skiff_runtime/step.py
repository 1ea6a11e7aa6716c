"""The hand-over between scheduler and engine: one planned step, and the handle to its result.

Everything here is numpy on the host. A plan names what changed since the last one
(tokens of newly admitted requests, page-table cells, sampling parameters), so that a
device keeps its own tables and nothing is sent twice.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from skiff_runtime.messages import SamplingParams

Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SlotOpened:
    """A request took a slot: its known tokens (prompt, or prompt and output after a retraction)."""

    slot: int
    tokens: Int32
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step over R rows; decode rows come first, then prefill chunks.

    Row i computes ``lengths[i]`` tokens of slot ``slots[i]`` at positions ``starts[i]`` ...;
    ``samples[i]`` tells whether its last position yields a token, which the engine also
    writes into the slot's token row at position ``starts[i] + lengths[i]``.
    ``page_slots/page_columns/page_ids`` [W] are cells of the page table to set before the step.
    """

    number: int
    slots: Int32
    starts: Int32
    lengths: Int32
    samples: NDArray[np.bool_]
    decode_rows: int
    opened: tuple[SlotOpened, ...]
    page_slots: Int32
    page_columns: Int32
    page_ids: Int32

    @property
    def tokens(self) -> int:
        """How many tokens this step computes."""
        return int(self.lengths.sum())


class StepHandle(Protocol):
    """A launched step."""

    def result(self) -> Int32:
        """Wait; the sampled tokens int32[S], one for each row whose ``samples`` is set, in row order."""
        ...


class StepEngine(Protocol):
    """What the scheduler needs of an engine.

    Steps run in the order of their launch. Within a step, a row may read pages that another
    row of it writes (prompts that arrive together share their prefix): every layer stores
    the K and V of all rows before any row attends.
    """

    def launch(self, plan: StepPlan) -> StepHandle:
        """Start a step and return at once; its input tokens are read on the device."""
        ...
