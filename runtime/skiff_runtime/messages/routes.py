"""Which messages each process takes."""

from skiff_runtime.messages.lifecycle import (
    Drain,
    Heartbeat,
    PhaseReport,
    ProcessFailed,
    ProcessHealth,
    Ready,
    ServiceFailed,
    ServiceReady,
)
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

ToTokenizer = TokenizeRequest | EncodeRequest | DecodeRequest | AbortRequest | FlushCache
ToScheduler = GenerateRequest | AbortRequest | FlushCache
ToLeader = ToScheduler | ProfileSteps
"""What rank 0 takes; a profile is no matter of the scheduler."""
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
ToSupervisor = Heartbeat | PhaseReport | Ready | ProcessFailed
