"""A request as the scheduler knows it, from its arrival to its end."""

from dataclasses import dataclass, field
from math import ceil
from time import perf_counter
from typing import Final

import numpy as np
from msgspec.structs import replace

from skiff_runtime.errors import ContextTooLong, InvalidRequest
from skiff_runtime.kvcache.namespace import CacheNamespace
from skiff_runtime.kvcache.prefix_cache import Int32, PrefixHandle
from skiff_runtime.messages import (
    CompiledGrammar,
    GenerateRequest,
    PoolingKind,
    PoolingSpec,
    SamplingSpec,
    TextOptions,
    Wire,
)
from skiff_runtime.prompt_blocks import PROMPT_BLOCK_BYTES, PromptBlocks
from skiff_runtime.step import NO_LORA_SLOT

NO_SLOT: Final = -1
NEVER_LOOKED_UP: Final = -1
NO_REQUEST_BEFORE: Final = (-(1 << 62), 0)
"""A queue key that is lower than that of any request."""
QueueKey = tuple[int, int]
"""A request's order in the queue; the lowest key runs first. See ``make_queue_key``."""


@dataclass(slots=True, eq=False)
class Request:
    """State that outlives a request's stay in a slot. Everything that changes with each step is in ``Slots``."""

    uid: int
    queue_key: QueueKey
    """Order in the queue. Preemption does not change it."""
    tokens: Int32
    """The known tokens when it enters the queue: the prompt, and after a preemption the output so far."""
    prompt_tokens: int
    sampling: SamplingSpec
    text: TextOptions
    grammar: CompiledGrammar | None = None
    pooling: PoolingSpec | None = None
    """With it, the request ends when its prompt has been computed, and generates nothing."""
    priority: int = 0
    salt: bytes = b""
    adapter_id: int = 0
    """The LoRA adapter that it runs on; 0 for the base model."""
    lora_slot: int = NO_LORA_SLOT
    """While it has a slot: the LoRA slot of its adapter."""
    slot: int = NO_SLOT
    handle: PrefixHandle | None = None
    """While it has a slot: the locked prefix of its page-table row, whose pages the prefix cache owns."""
    times_overtaken: int = 0
    """Requests that ran before it though they were behind it in the queue: they had longer cached prefixes, or an adapter in a
    LoRA slot."""
    num_cached_pages: int = 0
    """Pages of its prompt that were cached at the last lookup."""
    cache_version: int = NEVER_LOOKED_UP
    """``PrefixCache.version`` at that lookup."""
    has_started: bool = False
    """The client has been sent a ``StreamOpened``, which a request gets once, however often it is preempted."""
    cached_tokens: int = 0
    """Prompt tokens that were cached when it first ran."""
    uncached_tokens: int = 0
    """Tokens that it has to compute, as estimated when it entered the queue. For routers only."""
    prompt_blocks: tuple[tuple[int, int], ...] = ()
    """Pairs (page, hash) of its prompt blocks: a block is cached when this page and all before it are. Ascending."""
    num_noted_blocks: int = 0
    """Of these, the leading ones that the prefix cache knows."""
    num_prompt_logprobs_sent: int = 0
    """Tokens of its prompt whose log-probabilities were sent, where they are requested."""
    has_nan: bool = False
    """Its logits contain NaN, so no page that it computed or read may stay in the prefix cache."""
    arrived_at: float = field(default_factory=perf_counter)
    """For metrics only: clocks differ between ranks, so no decision may read this."""

    @property
    def remaining(self) -> int:
        """Output tokens still allowed when it enters a slot."""
        return self.sampling.max_tokens - (len(self.tokens) - self.prompt_tokens)

    @property
    def cacheable_tokens(self) -> Int32:
        """Leading tokens whose computation a cached prefix may replace.

        The last token is never among them: it must be computed to yield logits. Where log-probabilities of
        the prompt are requested, neither are the tokens from the one before the first that was not sent. A mean over the
        prompt needs the hidden states of all tokens, and the cache holds none.
        """
        if self.pooling is not None and self.pooling.kind is PoolingKind.MEAN:
            return self.tokens[:0]
        if self.sampling.prompt_logprobs is not None and self.num_prompt_logprobs_sent < self.prompt_tokens:
            return self.tokens[: max(0, self.num_prompt_logprobs_sent - 1)]
        return self.tokens[:-1]

    @property
    def is_looked_up(self) -> bool:
        """Return whether a cached prefix may replace a part of the prompt when the request first runs."""
        is_mean = self.pooling is not None and self.pooling.kind is PoolingKind.MEAN
        return self.sampling.prompt_logprobs is None and not is_mean

    def start(self, cached_tokens: int) -> None:
        """Record that it runs for the first time, with ``cached_tokens`` tokens of its prompt cached."""
        self.has_started = True
        self.cached_tokens = cached_tokens

    def preempt(self, tokens: Int32) -> None:
        """Keep the ``tokens`` known so far, and look up its cached prefix anew."""
        self.tokens = tokens
        self.cache_version = NEVER_LOOKED_UP
        self.num_noted_blocks = 0


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits on a single request, in tokens."""

    max_model_len: int
    kv_tokens: int

    @property
    def max_tokens(self) -> int:
        """Most tokens of prompt and output together."""
        return min(self.max_model_len, self.kv_tokens)


def make_queue_key(*, arrival: int, priority: int, arrivals_per_level: int) -> QueueKey:
    """Return the queue key of the ``arrival``-th request; a lower ``priority`` is more urgent.

    Each level of priority is worth a fixed number of arrivals (aging by count, since ranks must not read
    clocks): a request that is d levels more urgent overtakes another only if it arrives less than
    d * ``arrivals_per_level`` arrivals later. Keys never change, so no request starves.
    """
    return arrival + priority * arrivals_per_level, arrival


def make_request(
    message: GenerateRequest,
    *,
    queue_key: QueueKey,
    limits: RequestLimits,
    page_size: int,
    namespace: CacheNamespace,
) -> Request:
    """Make a ``Request`` of a message. Raises ``RequestError`` if it could never run to its end.

    ``max_tokens`` 0 becomes all that the context and the KV cache leave, which only this process knows; so does a larger
    ``max_tokens`` than that with ``fits_context``. With pooling there is no output.
    """
    tokens = np.frombuffer(message.token_ids, Wire.TOKEN).astype(np.int32, copy=False)
    room = max(1, limits.max_tokens - len(tokens))
    output = message.sampling.max_tokens or room
    if message.sampling.fits_context:
        output = min(output, room)
    if message.pooling is not None:
        output = 0
    if not len(tokens):
        raise InvalidRequest("the prompt is empty; it must have at least one token", param="prompt")
    if output < 1 and message.pooling is None:
        raise InvalidRequest(f"max_tokens must be at least 1, not {output}", param="max_tokens")
    _check_length(len(tokens), output, limits)
    return Request(
        uid=message.uid,
        queue_key=queue_key,
        tokens=tokens,
        uncached_tokens=len(tokens),
        prompt_tokens=len(tokens),
        sampling=replace(message.sampling, max_tokens=output),
        text=message.text,
        grammar=message.grammar,
        pooling=message.pooling,
        priority=message.priority,
        salt=namespace.encode(),
        adapter_id=namespace.adapter_id,
        prompt_blocks=locate_prompt_blocks(message.prompt_blocks, len(tokens), page_size),
    )


def locate_prompt_blocks(
    blocks: PromptBlocks | None, prompt_tokens: int, page_size: int
) -> tuple[tuple[int, int], ...]:
    """Return (page, hash) of each prompt block: the page in which its last byte is expected.

    Tokens are assumed to be equally long over the prompt, so this may be off by the spread of their lengths.
    """
    if blocks is None or not blocks.hashes:
        return ()
    hashes = blocks.names()
    per_block = prompt_tokens * PROMPT_BLOCK_BYTES / blocks.text_bytes
    ends = (min(prompt_tokens, ceil(per_block * number)) for number in range(1, len(hashes) + 1))
    return tuple((max(0, end - 1) // page_size, block) for end, block in zip(ends, hashes, strict=True))


def _check_length(prompt: int, output: int, limits: RequestLimits) -> None:
    needed = f"the prompt has {prompt} tokens and max_tokens is {output}, together {prompt + output}"
    if prompt + output > limits.max_model_len:
        raise ContextTooLong(f"{needed}; this model's context is {limits.max_model_len} tokens")
    if prompt + output > limits.kv_tokens:
        raise ContextTooLong(
            f"{needed}; the KV cache of this server holds {limits.kv_tokens} tokens. "
            "Shorten the prompt, lower max_tokens, or serve with a larger --max-total-tokens"
        )
