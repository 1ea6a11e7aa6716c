"""The typed messages between processes, their encoding, and the transport. Nothing else crosses processes.

msgspec encodes them as MessagePack. Messages of every step are columnar: their arrays are ``bytes`` of
little-endian numpy columns, so a batch of 256 rows takes 2 us to encode instead of 300. ``Wire`` has the
dtype of each column.

The route of a request: ``TokenizeRequest`` (api -> tokenizer) -> ``GenerateRequest`` (tokenizer -> rank 0)
-> ``RankInputs`` (rank 0 -> other ranks) -> ``TokenBatch`` (rank 0 -> detokenizer) -> ``TextBatch``
(detokenizer -> api). An ``AbortRequest`` takes the same route as its request, so it never overtakes it.
"""

from skiff_runtime.messages.cache_events import CacheEvents, KVBlocksRemoved, KVBlocksStored, WatchCache
from skiff_runtime.messages.encoding import MAX_MESSAGE_BYTES, NO_TOKEN, FinishReason, Wire, decoder, encode
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
from skiff_runtime.messages.lora import (
    AdapterLoaded,
    AdapterRead,
    AdapterRefused,
    LoadAdapter,
    UnloadAdapter,
)
from skiff_runtime.messages.pooling import PooledVector, PoolingKind, PoolingSpec
from skiff_runtime.messages.requests import (
    AbortRequest,
    ChatPrompt,
    DecodeRequest,
    EncodeRequest,
    FlushCache,
    GenerateRequest,
    ProfileSteps,
    PromptOptions,
    RankInputs,
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
from skiff_runtime.messages.sampling_spec import CompiledGrammar, Grammar, GrammarKind, SamplingSpec
from skiff_runtime.messages.text_batch import (
    Decoded,
    Encoded,
    PromptTextLogprobs,
    TextBatch,
    TextLogprobs,
    TokenText,
    Usage,
)
from skiff_runtime.messages.token_batch import (
    Flushed,
    PromptLogprobs,
    RequestFailed,
    StepStats,
    StreamOpened,
    TokenBatch,
    TokenLogprobs,
)

__all__ = [
    "MAX_MESSAGE_BYTES",
    "NO_TOKEN",
    "AbortRequest",
    "AdapterLoaded",
    "AdapterRead",
    "AdapterRefused",
    "CacheEvents",
    "ChatPrompt",
    "CompiledGrammar",
    "DecodeRequest",
    "Decoded",
    "Drain",
    "EncodeRequest",
    "Encoded",
    "FinishReason",
    "FlushCache",
    "Flushed",
    "GenerateRequest",
    "Grammar",
    "GrammarKind",
    "Heartbeat",
    "KVBlocksRemoved",
    "KVBlocksStored",
    "LoadAdapter",
    "PhaseReport",
    "PooledVector",
    "PoolingKind",
    "PoolingSpec",
    "ProcessFailed",
    "ProcessHealth",
    "ProfileSteps",
    "PromptLogprobs",
    "PromptOptions",
    "PromptTextLogprobs",
    "RankInputs",
    "Ready",
    "RequestFailed",
    "SamplingSpec",
    "ServiceFailed",
    "ServiceReady",
    "Serving",
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
    "UnloadAdapter",
    "Usage",
    "WatchCache",
    "Wire",
    "decoder",
    "encode",
]
