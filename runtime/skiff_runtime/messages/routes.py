"""Which messages each process takes."""

from skiff_runtime.messages.requests import (
    AbortRequest,
    DecodeRequest,
    EncodeRequest,
    FlushCache,
    GenerateRequest,
    ProfileSteps,
    TokenizeRequest,
)
from skiff_runtime.messages.service import (
    Beats,
    Drain,
    Heartbeat,
    PhaseReport,
    ProcessFailed,
    Ready,
    ServiceFailed,
    ServiceReady,
)
from skiff_runtime.messages.texts import Decoded, Encoded, TextBatch
from skiff_runtime.messages.tokens import RequestFailed, TokenBatch

ToTokenizer = TokenizeRequest | EncodeRequest | DecodeRequest | AbortRequest | FlushCache
ToScheduler = GenerateRequest | AbortRequest | FlushCache
ToLeader = ToScheduler | ProfileSteps
"""What rank 0 takes; a profile is no matter of the scheduler."""
ToDetokenizer = TokenBatch
ToApi = (
    TextBatch | RequestFailed | Encoded | Decoded | PhaseReport | Beats | ServiceReady | Drain | ServiceFailed
)
ToSupervisor = Heartbeat | PhaseReport | Ready | ProcessFailed
