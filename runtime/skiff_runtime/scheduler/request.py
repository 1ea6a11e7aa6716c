"""One request as the scheduler knows it, from its arrival to its end."""

from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
from msgspec.structs import replace

from skiff_runtime.errors import ContextTooLong, InvalidRequest
from skiff_runtime.kvcache.prefix_cache import Handle, Int32
from skiff_runtime.messages import CompiledGrammar, GenerateRequest, SamplingSpec, TextOptions, Wire

QUEUED = -1
NEVER = -1
Place = tuple[int, int]
"""A place in the queue; the least goes first."""


@dataclass(slots=True, eq=False)
class Request:
    """What outlives a request's stay in a slot; all that changes with each step is in ``Slots``."""

    uid: int
    place: Place
    """Where it stands in the queue, which preemption does not change. See ``place_of``."""
    tokens: Int32
    """What is known when it enters the queue: the prompt; after a preemption also the output."""
    prompt_tokens: int
    sampling: SamplingSpec
    text: TextOptions
    grammar: CompiledGrammar | None = None
    priority: int = 0
    salt: bytes = b""
    slot: int = QUEUED
    handle: Handle | None = None
    """The locked prefix of its page-table row that the cache owns, while it has a slot."""
    passed: int = 0
    """How many from behind it were admitted before it for the sake of their cached prefixes."""
    depth: int = 0
    """Pages of its prompt that were cached, when last looked up: at so many ``changes`` of the cache."""
    looked_up: int = NEVER
    opened: bool = False
    """Whether the client has been told that it runs."""
    cached_tokens: int = 0
    """How much of its prompt the cache had when it first ran."""
    num_prompt_logprobs_sent: int = 0
    """Of how many tokens of its prompt the log-probabilities were told, where they are asked for."""
    corrupted: bool = False
    """Its logits contained NaN, so no page that it computed or read may stay in the prefix cache."""
    arrived_at: float = field(default_factory=perf_counter)
    """For reports only: what decides must be alike on all ranks, and clocks are not."""

    @property
    def remaining(self) -> int:
        """Output tokens still allowed when it enters a slot."""
        return self.sampling.max_tokens - (len(self.tokens) - self.prompt_tokens)

    @property
    def cacheable_tokens(self) -> Int32:
        """Its first tokens, which need not be computed where their KV is cached.

        The last token is left out: it must be computed for there to be logits. So is, where log-probabilities of
        the prompt are asked for, what comes before the first token that has not been told.
        """
        if self.sampling.prompt_logprobs is not None and self.num_prompt_logprobs_sent < self.prompt_tokens:
            return self.tokens[: max(0, self.num_prompt_logprobs_sent - 1)]
        return self.tokens[:-1]


@dataclass(frozen=True, slots=True)
class Limits:
    """The longest request that can run at all, in tokens."""

    max_model_len: int
    kv_tokens: int

    @property
    def longest(self) -> int:
        """Prompt and output together."""
        return min(self.max_model_len, self.kv_tokens)


def place_of(*, arrival: int, priority: int, arrivals_per_level: int) -> Place:
    """Where the ``arrival``-th request stands in the queue.

    Each level of priority is worth a number of arrivals: a request is overtaken by one of ``levels`` less only
    while fewer than ``levels * arrivals_per_level`` others have arrived after it. So nothing starves, and no place
    ever changes.
    """
    return arrival + priority * arrivals_per_level, arrival


def accept(message: GenerateRequest, *, place: Place, limits: Limits) -> Request:
    """Make a request of a message; RequestError when it could never run to its end.

    ``max_tokens`` 0 becomes what context and KV cache leave, which only this process knows.
    """
    tokens = np.frombuffer(message.token_ids, Wire.TOKEN).astype(np.int32, copy=False)
    output = message.sampling.max_tokens or max(1, limits.longest - len(tokens))
    if not len(tokens):
        raise InvalidRequest("the prompt is empty; it must have at least one token", param="prompt")
    if output < 1:
        raise InvalidRequest(f"max_tokens must be at least 1, not {output}", param="max_tokens")
    _refuse_too_long(len(tokens), output, limits)
    return Request(
        uid=message.uid,
        place=place,
        tokens=tokens,
        prompt_tokens=len(tokens),
        sampling=replace(message.sampling, max_tokens=output),
        text=message.text,
        grammar=message.grammar,
        priority=message.priority,
        salt=message.cache_salt,
    )


def _refuse_too_long(prompt: int, output: int, limits: Limits) -> None:
    needed = f"the prompt has {prompt} tokens and max_tokens is {output}, together {prompt + output}"
    if prompt + output > limits.max_model_len:
        raise ContextTooLong(f"{needed}; this model's context is {limits.max_model_len} tokens")
    if prompt + output > limits.kv_tokens:
        raise ContextTooLong(
            f"{needed}; the KV cache of this server holds {limits.kv_tokens} tokens. "
            "Shorten the prompt, lower max_tokens, or serve with a larger --max-total-tokens"
        )
