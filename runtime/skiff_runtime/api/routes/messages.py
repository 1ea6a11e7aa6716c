"""Anthropic's Messages API beside generation: POST /v1/messages/count_tokens, and the documentation of POST /v1/messages."""

from typing import Any, Final

import numpy as np
from fastapi import APIRouter

from skiff_runtime import contract
from skiff_runtime.api.dispatch.rpc import RpcClient
from skiff_runtime.api.formats.messages import build_messages_prompt
from skiff_runtime.api.formats.served_model import ServedModel
from skiff_runtime.api.parsing.output_parser import plan_output
from skiff_runtime.api.routes.generation_endpoint import document_responses, make_generation_router
from skiff_runtime.api.routes.json_body import BoundedRoute, JsonBody
from skiff_runtime.api.routes.openapi import REQUEST_ID_RESPONSE_HEADER, error_responses
from skiff_runtime.api.schemas.messages_request import CountTokensRequest, MessagesRequest
from skiff_runtime.api.schemas.messages_response import (
    AnthropicErrorResponse,
    MessageResponse,
    MessageStreamEvent,
    TokenCountResponse,
)
from skiff_runtime.messages import Encoded, EncodeRequest, Wire

_STATUSES: Final = (400, 404, 408, 413, 429, 500, 503)
_OTHER_ERROR: Final[dict[int | str, dict[str, Any]]] = {
    "default": {
        "model": AnthropicErrorResponse,
        "description": "Any other error.",
        "headers": REQUEST_ID_RESPONSE_HEADER,
    }
}


def make_messages_routes(model: ServedModel, rpc: RpcClient, *, keyed: bool) -> APIRouter:
    """Return the token count, and the route that documents POST /v1/messages and is never called.

    ``keyed``: the service has API keys.
    """
    refusal = 401 if keyed else 403
    router = APIRouter(responses={**_OTHER_ERROR, **error_responses(refusal, error=AnthropicErrorResponse)})
    generation = make_generation_router(AnthropicErrorResponse)
    counting = APIRouter(
        tags=["tokens"],
        route_class=BoundedRoute,
        responses=error_responses(*_STATUSES, error=AnthropicErrorResponse),
    )

    @generation.post(
        contract.PATH_MESSAGES,
        summary="Answer a conversation (Anthropic's Messages API)",
        **document_responses(
            MessageResponse, MessageStreamEvent, error=AnthropicErrorResponse, has_done_event=False
        ),
    )
    async def messages(body: MessagesRequest) -> None:
        """With "stream": true the response is a stream of server-sent events, each with the name of its type."""

    @counting.post(contract.PATH_COUNT_TOKENS, summary="Count the tokens of a conversation")
    async def count_tokens(body: JsonBody[CountTokensRequest]) -> TokenCountResponse:
        """Return the number of tokens of the prompt that POST /v1/messages would make of the same fields."""
        model.choose(body.model)
        prompt = build_messages_prompt(body, model.output_format)
        # Tools that POST /v1/messages would refuse are refused here too.
        plan_output(body.tool_fields(), prompt, None, model.output_format)
        encoded = await rpc.call(lambda uid: EncodeRequest(uid, prompt))
        assert isinstance(encoded, Encoded)
        return TokenCountResponse(input_tokens=len(encoded.token_ids) // np.dtype(Wire.TOKEN).itemsize)

    router.include_router(generation)
    router.include_router(counting)
    return router
