"""The generation endpoints in the OpenAPI document.

The functions here declare bodies and replies and are never called: the gate hands POST requests on these paths to
``GenerationEndpoint`` before FastAPI sees them (docs/decisions/0012-fastapi-beside-the-hot-path.md has the costs).
"""

from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Header, Response
from pydantic import BaseModel, Field
from pydantic.json_schema import SkipJsonSchema

from skiff_runtime import contract
from skiff_runtime.api.http.request_body import MAX_DEADLINE_SECONDS
from skiff_runtime.api.routes.openapi import DEFAULT_RESPONSES, failures
from skiff_runtime.api.schemas.request_bodies import ChatCompletionRequest, CompletionRequest, GenerateBody
from skiff_runtime.api.schemas.response_bodies import (
    ChatCompletionChunk,
    ChatCompletionResponse,
    CompletionResponse,
    GenerateResponse,
)

EVENTS: Final = "text/event-stream"


async def _headers(
    x_request_timeout_seconds: Annotated[
        Annotated[float, Field(gt=0, le=MAX_DEADLINE_SECONDS)] | SkipJsonSchema[None],
        Header(description="End the request after this many seconds."),
    ] = None,
    traceparent: Annotated[str, Header(description="W3C trace context.")] = "",
) -> None:
    """Document the headers that the endpoints read."""


def _replies(whole: type[BaseModel], event: type[BaseModel]) -> dict[str, Any]:
    """Document a reply that is JSON, or a stream of events.

    ``response_model`` puts the schema of the events among the document's components.
    """
    events = {
        "type": "string",
        "description": "Lines 'data: JSON'; the last is 'data: [DONE]'.",
        "contentMediaType": "application/json",
        "contentSchema": {"$ref": f"#/components/schemas/{event.__name__}"},
    }
    success = {**DEFAULT_RESPONSES[200], "model": whole, "content": {EVENTS: {"schema": events}}}
    return {"response_class": Response, "response_model": event, "responses": {200: success}}


def generation_routes() -> APIRouter:
    """Return the operations."""
    router = APIRouter(
        tags=["generation"],
        dependencies=[Depends(_headers)],
        responses=failures(400, 404, 408, 413, 429, 500, 503, 504),
    )

    @router.post(
        contract.PATH_CHAT_COMPLETIONS,
        summary="Answer a conversation",
        **_replies(ChatCompletionResponse, ChatCompletionChunk),
    )
    async def chat_completions(body: ChatCompletionRequest) -> None:
        """With "stream": true the reply is a stream of server-sent events."""

    @router.post(
        contract.PATH_COMPLETIONS,
        summary="Continue a text",
        **_replies(CompletionResponse, CompletionResponse),
    )
    async def completions(body: CompletionRequest) -> None:
        """With "stream": true the reply is a stream of server-sent events."""

    @router.post(
        contract.PATH_GENERATE,
        summary="Continue a text or token ids",
        **_replies(GenerateResponse, GenerateResponse),
    )
    async def generate(body: GenerateBody) -> None:
        """The native endpoint: text or token ids in, text and token ids out, or a stream of server-sent events."""

    return router
