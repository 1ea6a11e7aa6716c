"""The hand-over between scheduler and engine: one planned step, and the handle to its result.

Everything here is numpy on the host. A plan names what changed since the last one
(tokens of newly admitted requests, page-table cells, sampling parameters), so that a
device keeps its own tables and nothing is sent twice.
"""

from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from skiff_runtime.messages import CompiledGrammar, SamplingSpec

NAN_LOGITS: Final = -2
"""In ``StepResult.tokens``: the row's logits contain NaN, so no token can be sampled from them."""
Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SlotOpened:
    """A request took a slot: its known tokens, the first ``prompt_tokens`` of which are the prompt.

    The others are output from before a preemption, which penalties count and a grammar has accepted.
    """

    slot: int
    tokens: Int32
    sampling: SamplingSpec
    prompt_tokens: int
    grammar: CompiledGrammar | None = None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step over R rows; decode rows come first, then prefill chunks.

    Row i computes ``lengths[i]`` tokens of slot ``slots[i]`` at positions ``starts[i]`` ...;
    ``samples[i]`` tells whether its last position yields a token, which the engine also
    writes into the slot's token row at position ``starts[i] + lengths[i]``.
    ``page_slots/page_columns/page_ids`` [W] are cells of the page table to set before the step, none of them twice.
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


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities at n positions: of the token there, float32[n], and of the k likeliest.

    ``top_ids`` int32[n, k] and ``top`` float32[n, k] are sorted, likeliest first; k is the most that any of the
    n positions asks for.
    """

    chosen: Float32
    top_ids: Int32
    top: Float32


@dataclass(frozen=True, slots=True)
class PromptLogprobsOutput:
    """Log-probabilities of the tokens of one slot's prompt that stand at positions ``start`` and on."""

    slot: int
    start: int
    logprobs: Logprobs


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step brought: ``tokens`` int32[S], one for each row whose ``samples`` is set, in row order.

    A token is ``messages.NO_TOKEN`` where the request's grammar admits none, or cannot be followed, and ``NAN_LOGITS``
    where the row's logits contain NaN: such a request can only end. ``logprobs`` tell of those of the S that ask for them, ``logprob_rows`` int32[n] which these are.
    """

    tokens: Int32
    logprob_rows: Int32 = field(default_factory=lambda: np.empty(0, np.int32))
    logprobs: Logprobs | None = None
    prompts: tuple[PromptLogprobsOutput, ...] = ()


class StepHandle(Protocol):
    """A launched step."""

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until the step has run (or failed), but no longer than this; whether it has."""
        ...

    def result(self) -> StepResult:
        """Wait until the step has run."""
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
