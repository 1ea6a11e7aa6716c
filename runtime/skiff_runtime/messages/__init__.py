"""The typed messages that cross process boundaries; nothing else does.

Encoded as MessagePack by msgspec. What flows once per step is columnar: arrays are
``bytes`` of little-endian numpy columns, so a batch of 256 rows costs two microseconds
to encode, not three hundred. ``Wire`` names the dtype of each column.

The way of a request: ``TokenizeRequest`` (api -> tokenizer) -> ``GenerateRequest``
(tokenizer -> rank 0) -> ``Inbox`` (rank 0 -> other ranks) -> ``TokenBatch`` (rank 0 ->
detokenizer) -> ``TextBatch`` (detokenizer -> api). ``AbortRequest`` takes the same way
as the request it ends, so that it never overtakes it.
"""

from skiff_runtime.messages.requests import (
    AbortRequest,
    ChatPrompt,
    DecodeRequest,
    EncodeRequest,
    FlushCache,
    GenerateRequest,
    Inbox,
    ProfileSteps,
    Shutdown,
    TextOptions,
    TokenizeRequest,
)
from skiff_runtime.messages.routes import (
    ToApi,
    ToDetokenizer,
    ToLeader,
    ToScheduler,
    ToSupervisor,
    ToTokenizer,
)
from skiff_runtime.messages.sampling import CompiledGrammar, Grammar, GrammarKind, SamplingParams
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
from skiff_runtime.messages.texts import (
    Decoded,
    Encoded,
    PromptTextLogprobs,
    TextBatch,
    TextLogprobs,
    TokenText,
    Usage,
)
from skiff_runtime.messages.tokens import (
    Flushed,
    PromptLogprobs,
    RequestFailed,
    StepStats,
    StreamOpened,
    TokenBatch,
    TokenLogprobs,
)
from skiff_runtime.messages.wire import MAX_MESSAGE_BYTES, NO_TOKEN, Finish, Wire, decoder, encode

__all__ = [
    "MAX_MESSAGE_BYTES",
    "NO_TOKEN",
    "AbortRequest",
    "Beats",
    "ChatPrompt",
    "CompiledGrammar",
    "DecodeRequest",
    "Decoded",
    "Drain",
    "EncodeRequest",
    "Encoded",
    "Finish",
    "FlushCache",
    "Flushed",
    "GenerateRequest",
    "Grammar",
    "GrammarKind",
    "Heartbeat",
    "Inbox",
    "PhaseReport",
    "ProcessFailed",
    "ProfileSteps",
    "PromptLogprobs",
    "PromptTextLogprobs",
    "Ready",
    "RequestFailed",
    "SamplingParams",
    "ServiceFailed",
    "ServiceReady",
    "Shutdown",
    "StepStats",
    "StreamOpened",
    "TextBatch",
    "TextLogprobs",
    "TextOptions",
    "ToApi",
    "ToDetokenizer",
    "ToLeader",
    "ToScheduler",
    "ToSupervisor",
    "ToTokenizer",
    "TokenBatch",
    "TokenLogprobs",
    "TokenText",
    "TokenizeRequest",
    "Usage",
    "Wire",
    "decoder",
    "encode",
]
