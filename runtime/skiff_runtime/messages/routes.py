"""The messages that each process receives."""

from skiff_runtime.messages.cache_events import WatchCache
from skiff_runtime.messages.lifecycle import (
    Drain,
    Heartbeat,
    PhaseReport,
    ProcessFailed,
    ProcessHealth,
    Ready,
    ServiceFailed,
    ServiceReady,
    Serving,
)
from skiff_runtime.messages.lora import LoadAdapter, UnloadAdapter
from skiff_runtime.messages.requests import (
    AbortRequest,
    DecodeRequest,
    EncodeRequest,
    FlushCache,
    GenerateRequest,
    ProfileSteps,
    TokenizeRequest,
)
from skiff_runtime.messages.text_batch import Decoded, Encoded, TextBatch
from skiff_runtime.messages.token_batch import RequestFailed, TokenBatch

ToTokenizer = (
    TokenizeRequest
    | EncodeRequest
    | DecodeRequest
    | AbortRequest
    | FlushCache
    | WatchCache
    | LoadAdapter
    | UnloadAdapter
)
ToScheduler = GenerateRequest | AbortRequest | FlushCache | WatchCache | LoadAdapter | UnloadAdapter
ToLeader = ToScheduler | ProfileSteps
"""Rank 0 handles a profile itself; the scheduler does not see it."""
ToDetokenizer = TokenBatch
ToApi = (
    TextBatch
    | RequestFailed
    | Encoded
    | Decoded
    | PhaseReport
    | ProcessHealth
    | ServiceReady
    | Drain
    | ServiceFailed
)
ToSupervisor = Heartbeat | PhaseReport | Ready | Serving | ProcessFailed
