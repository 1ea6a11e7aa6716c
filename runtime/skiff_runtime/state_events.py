"""The events of ``GET /events``, by which a router follows a pod: its load, its state, and what its prefix cache holds.

Each is one server-sent event, whose ``data`` is one of these structs as JSON and whose ``id`` counts the events of the
stream from 0, so that a gap is noticed. KV cache events have the shape and the meaning of vLLM's.
"""

from typing import Final

from msgspec import Struct

INCLUDE_PROMPT_BLOCKS: Final = "prompt_blocks"
INCLUDE_KV_BLOCKS: Final = "kv_blocks"
HEARTBEAT_SECONDS: Final = 0.075
"""Longest silence of a stream: without a change, a comment is sent."""
HEARTBEAT: Final = b":\n\n"
MIN_INTERVAL_SECONDS: Final = 0.05
"""Shortest time between the reports of a pod's changes."""
URGENT_INTERVAL_SECONDS: Final = 0.01
"""The same for the arrival of a request that has much to compute."""
URGENT_TOKENS: Final = 256
"""Prompt tokens to compute from which on an arrival is urgent: those of a prompt block, which take as long as a step or two."""


class PodLoad(Struct, frozen=True):
    """The load of a pod, and the model of its step times.

    ``requests``: accepted and not ended, of ``max_requests``; beyond them a request gets a 429. ``waiting`` and
    ``running`` are those that the scheduler knows, ``max_running`` bounds the second. ``queued_tokens``: prompt tokens of
    waiting requests that are not cached; ``prefill_tokens``: those of running requests that are not computed yet.
    ``arriving_tokens``: estimate for accepted requests that the scheduler had not received when it counted; None from a pod
    that makes no estimate. ``kv_cache_usage``: fraction that running requests occupy.

    A step takes ``step_seconds`` and ``prefill_token_seconds`` for each of the prompt tokens in it, at most
    ``max_step_tokens``; both are measured, and 0 before the first step. ``finish_seconds``: time between the ends of requests
    while others wait. ``bytes_per_token``: of the JSON text of prompts.
    """

    requests: int = 0
    max_requests: int = 0
    waiting: int = 0
    running: int = 0
    max_running: int = 0
    queued_tokens: int = 0
    prefill_tokens: int = 0
    kv_cache_usage: float = 0.0
    step_seconds: float = 0.0
    prefill_token_seconds: float = 0.0
    max_step_tokens: int = 0
    finish_seconds: float = 0.0
    bytes_per_token: float = 0.0
    arriving_tokens: int | None = None


class PodAdapters(Struct, frozen=True):
    """The LoRA adapters of a pod by name. ``loaded``: it answers for them; ``resident``: those in a LoRA slot of GPU memory."""

    loaded: list[str] = []
    resident: list[str] = []


class Snapshot(Struct, frozen=True, tag="snapshot"):
    """The first event of a stream. What it holds replaces everything that was known of the pod.

    ``instance`` differs between two starts of a pod. ``state`` is that of ``/readyz``. ``isolates_keys``: requests share cached
    prefixes only with those of the same API key. KV blocks follow in ``KVBlocksChanged``. ``acknowledges``: the load events of
    this stream list the router's requests that they include.
    """

    instance: str
    model: str
    state: str
    block_size: int
    kv_tokens: int
    isolates_keys: bool
    load: PodLoad
    prompt_blocks: list[int]
    adapters: PodAdapters | None = None
    acknowledges: bool = False


class LoadChanged(Struct, frozen=True, tag="load"):
    """The pod's state and load, and its adapters where they have changed.

    ``received``: numbers of the subscribing router's requests that this load is the first to include.
    """

    state: str
    load: PodLoad
    adapters: PodAdapters | None = None
    received: list[int] = []


class PromptBlocksChanged(Struct, frozen=True, tag="prompt_blocks"):
    """Prompt blocks whose tokens have entered or left the prefix cache."""

    stored: list[int]
    removed: list[int]


class BlockStored(Struct, frozen=True, tag="BlockStored"):
    """Consecutive KV blocks entered the cache, behind ``parent_block_hash``; their token ids are left out.

    ``lora_id`` and ``lora_name``: of the adapter that computed them, None for the base model.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    block_size: int
    token_ids: list[int] = []
    lora_id: int | None = None
    medium: str = "GPU"
    lora_name: str | None = None


class BlockRemoved(Struct, frozen=True, tag="BlockRemoved"):
    """KV blocks left the cache."""

    block_hashes: list[int]
    medium: str = "GPU"


class AllBlocksCleared(Struct, frozen=True, tag="AllBlocksCleared"):
    """The cache holds no KV block."""


class KVBlocksChanged(Struct, frozen=True, tag="kv_blocks"):
    """Changes of the KV cache in their order. ``ts``: seconds since 1970."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


StateEvent = Snapshot | LoadChanged | PromptBlocksChanged | KVBlocksChanged
