"""The interface between scheduler and engine: a planned step, and the handle to its result.

Everything here is numpy on the host. A plan lists only what has changed since the one before it (tokens of newly
admitted requests, cells of the page table, sampling parameters), so a device keeps its own tables and no value is
sent twice.
"""

from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from skiff_runtime.messages import CompiledGrammar, PoolingSpec, SamplingSpec

NAN_LOGITS: Final = -2
"""In ``StepResult.tokens``: the row's logits contain NaN, so no token can be sampled from them."""
NO_LORA_SLOT: Final = -1
"""In ``SlotOpened.lora_slot``: the request runs on the base model."""
Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SlotOpened:
    """A request has taken a slot. The first ``prompt_tokens`` of its ``tokens`` int32[n] are the prompt.

    The tokens after these are output from before a preemption. Penalties count them, and the grammar has accepted them.
    With ``pooling`` the request has no output: when its last prompt token is computed, so is its vector. ``lora_slot`` is
    the LoRA slot of its adapter as long as it has the slot, ``NO_LORA_SLOT`` without one.
    """

    slot: int
    tokens: Int32
    sampling: SamplingSpec
    prompt_tokens: int
    grammar: CompiledGrammar | None = None
    pooling: PoolingSpec | None = None
    lora_slot: int = NO_LORA_SLOT


@dataclass(frozen=True, slots=True)
class LoraLoad:
    """An adapter takes a LoRA slot: its matrices replace what the slot holds before the step runs, in stream order."""

    lora_slot: int
    adapter_id: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step over R rows; decode rows come first, prefill chunks after them.

    Row i computes ``lengths[i]`` tokens of slot ``slots[i]``, at positions ``starts[i]`` and on. Where ``samples[i]``
    is set, its last position yields a token, which the engine also writes into the slot's line of the token table, at
    position ``starts[i] + lengths[i]``. ``page_slots``, ``page_columns`` and ``page_ids`` int32[W] are cells of the
    page table to set before the step; no cell occurs twice. With ``captures_graph``, the engine captures the next of its
    deferred CUDA graphs before the step; a plan without rows does nothing else. ``lora_loads`` are applied before any row
    is computed; no LoRA slot occurs twice.
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
    captures_graph: bool = False
    lora_loads: tuple[LoraLoad, ...] = ()

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prefill chunks."""
        return self.num_tokens - self.decode_rows

    @property
    def num_tokens(self) -> int:
        """Number of tokens that this step computes."""
        return int(self.lengths.sum())


@dataclass(frozen=True, slots=True)
class LogprobsOutput:
    """Log-probabilities at n positions: of the token at each position, and of the k most likely tokens there.

    ``token_logprobs`` is float32[n]. ``top_ids`` int32[n, k] and ``top_logprobs`` float32[n, k] are sorted, the most
    likely first; k is the largest number that any of the n positions requests. ``token_ranks`` int32[n], of the positions
    of a prompt alone, counts the tokens that are at least as likely as the position's own.
    """

    token_logprobs: Float32
    top_ids: Int32
    top_logprobs: Float32
    token_ranks: Int32 | None = None


@dataclass(frozen=True, slots=True)
class PromptLogprobsOutput:
    """Log-probabilities of the tokens of one slot's prompt at positions ``start`` and on."""

    slot: int
    start: int
    logprobs: LogprobsOutput


@dataclass(frozen=True, slots=True)
class PooledOutput:
    """Vectors float32[N, size] of the requests in ``slots`` int32[N], whose prompts end in this step."""

    slots: Int32
    vectors: Float32


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a step: ``tokens`` int32[S], one for each row whose ``samples`` is set, in the order of the rows.

    A token is ``messages.NO_TOKEN`` where the request's grammar admits no token or could not be loaded, and
    ``NAN_LOGITS`` where the row's logits contain NaN: such a request can only end. ``logprobs`` covers those of the S
    tokens whose requests want log-probabilities; ``logprob_rows`` int32[n] are their indices among the S. ``pooled`` has
    the vectors of all requests with pooling whose last prompt token the step computed.
    """

    tokens: Int32
    logprob_rows: Int32 = field(default_factory=lambda: np.empty(0, np.int32))
    logprobs: LogprobsOutput | None = None
    prompt_logprobs: tuple[PromptLogprobsOutput, ...] = ()
    pooled: tuple[PooledOutput, ...] = ()


class StepHandle(Protocol):
    """A launched step."""

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until the step has run or failed, at most this long; return whether it has.

        Raises ``CollectiveTimeout`` if a collective of this rank has given up, whether or not the step still runs.
        """
        ...

    def result(self) -> StepResult:
        """Wait until the step has run, and return its result."""
        ...


class StepEngine(Protocol):
    """The interface of an engine, as the scheduler uses it.

    Steps run in the order of their launch. Within a step, a row may read pages that another row of it writes (prompts
    that arrive together share their prefix): every layer stores the K and V of all rows before any row attends.
    """

    def launch(self, plan: StepPlan) -> StepHandle:
        """Start a step and return at once; its input tokens are read on the device."""
        ...
