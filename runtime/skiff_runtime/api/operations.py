"""What the API serves: every method of every path, with the shapes of what goes in and out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pydantic import BaseModel

from skiff_runtime import contract
from skiff_runtime.api import reply_schemas as replies
from skiff_runtime.api.control import AbortBody
from skiff_runtime.api.schemas import ChatRequest, CompletionRequest, GenerateBody
from skiff_runtime.api.tokens import DetokenizeBody, TokenizeBody

JSON: Final = "application/json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path. ``errors`` are statuses beyond 401 and 403; ``plain``: the reply is text of this type."""

    path: str
    summary: str
    about: str = ""
    method: str = "get"
    body: type[BaseModel] | None = None
    reply: type[BaseModel] | None = None
    events: type[BaseModel] | None = None
    plain: str = ""
    errors: Sequence[int] = ()


_GENERATION_ERRORS: Final = (400, 404, 408, 413, 429, 500, 503, 504)
_QUERY_ERRORS: Final = (400, 404, 408, 413, 429, 500, 503)
_STREAM: Final = 'With "stream": true the reply is a stream of server-sent events.'

OPERATIONS: Final = (
    Operation(
        path=contract.PATH_CHAT_COMPLETIONS,
        method="post",
        summary="Answer a conversation",
        about=_STREAM,
        body=ChatRequest,
        reply=replies.ChatReply,
        events=replies.ChatChunk,
        errors=_GENERATION_ERRORS,
    ),
    Operation(
        path=contract.PATH_COMPLETIONS,
        method="post",
        summary="Continue a text",
        about=_STREAM,
        body=CompletionRequest,
        reply=replies.CompletionReply,
        events=replies.CompletionReply,
        errors=_GENERATION_ERRORS,
    ),
    Operation(
        path=contract.PATH_GENERATE,
        method="post",
        summary="Continue a text or token ids",
        about="The native endpoint: text or token ids in, text and token ids out. " + _STREAM,
        body=GenerateBody,
        reply=replies.GenerateReply,
        events=replies.GenerateReply,
        errors=_GENERATION_ERRORS,
    ),
    Operation(
        path=contract.PATH_TOKENIZE,
        method="post",
        summary="Tell the token ids of a prompt",
        about="Takes a text or a conversation.",
        body=TokenizeBody,
        reply=replies.TokenizeReply,
        errors=_QUERY_ERRORS,
    ),
    Operation(
        path=contract.PATH_DETOKENIZE,
        method="post",
        summary="Tell the text of token ids",
        body=DetokenizeBody,
        reply=replies.DetokenizeReply,
        errors=_QUERY_ERRORS,
    ),
    Operation(
        path=contract.PATH_ABORT,
        method="post",
        summary="End requests early",
        about="Ends a request, known by its X-Request-Id or by the id of its reply, or all. Clients get what there is.",
        body=AbortBody,
        reply=replies.AbortReply,
        errors=(400, 408, 413),
    ),
    Operation(
        path=contract.PATH_FLUSH_CACHE,
        method="post",
        summary="Forget cached prefixes",
        about="Frees every page of the prefix cache that no request holds. There is no body to send.",
        reply=replies.FlushReply,
        errors=(429, 500, 503),
    ),
    Operation(path=contract.PATH_MODELS, summary="List the served model", reply=replies.ModelList),
    Operation(
        path=contract.PATH_MODELS + "/{model}",
        summary="Tell about the served model",
        reply=replies.ModelCard,
        errors=(404,),
    ),
    Operation(
        path=contract.PATH_SERVER_INFO, summary="Tell version and configuration", reply=replies.ServerInfo
    ),
    Operation(
        path=contract.PATH_LIVEZ,
        summary="Alive?",
        about="200 until the service fails.",
        reply=replies.StatusReply,
        errors=(503,),
    ),
    Operation(
        path=contract.PATH_READYZ,
        summary="Ready?",
        about="200 while new requests are served.",
        reply=replies.StatusReply,
        errors=(503,),
    ),
    Operation(
        path=contract.PATH_STARTUPZ,
        summary="Started?",
        about="200 once every process is ready; the body tells how far each is.",
        reply=replies.StartReply,
        errors=(503,),
    ),
    Operation(
        path=contract.PATH_HEALTH_GENERATE,
        summary="Generate one token",
        about="One real token through every process.",
        reply=replies.HealthReply,
        errors=(429, 500, 503),
    ),
    Operation(
        path=contract.PATH_METRICS, summary="Metrics", about="Prometheus' text format.", plain="text/plain"
    ),
    Operation(path=contract.PATH_OPENAPI, summary="This description", plain=JSON),
    Operation(path=contract.PATH_DOCS, summary="This description, to be read by people", plain="text/html"),
)

ONE_OF: Final[dict[type[BaseModel], tuple[str, str]]] = {
    AbortBody: ("request_id", "all"),
    GenerateBody: ("text", "token_ids"),
    TokenizeBody: ("prompt", "messages"),
}
"""Bodies that must have exactly one of two fields."""
