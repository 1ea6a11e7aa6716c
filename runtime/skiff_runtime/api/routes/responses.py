"""The Responses API beside generation: stored responses, their input items, and the documentation of POST /v1/responses."""

import re
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Request, Response

from skiff_runtime import contract
from skiff_runtime.api.formats.response_store import ResponseStore
from skiff_runtime.api.http.auth import get_principal
from skiff_runtime.api.http.responses import JSON
from skiff_runtime.api.routes.generation_endpoint import document_responses, make_generation_router
from skiff_runtime.api.routes.openapi import DEFAULT_RESPONSES, error_responses
from skiff_runtime.api.schemas.responses_object import (
    DeletedResponse,
    ItemList,
    ResponseObject,
    ResponseStreamEvent,
)
from skiff_runtime.api.schemas.responses_request import ResponsesRequest
from skiff_runtime.errors import InvalidRequest
from skiff_runtime.sse import encode_json

_PATH: Final = contract.PATH_RESPONSES + "/{response_id}"
DEFAULT_LISTED_ITEMS: Final = 20
MAX_LISTED_ITEMS: Final = 100


def make_response_routes(store: ResponseStore) -> APIRouter:
    """Return the operations on stored responses, and the route that documents POST /v1/responses and is never called."""
    router = APIRouter()
    generation = make_generation_router()

    @generation.post(
        contract.PATH_RESPONSES,
        summary="Answer a conversation (Responses API)",
        **document_responses(ResponseObject, ResponseStreamEvent, has_done_event=False),
    )
    async def responses(body: ResponsesRequest) -> None:
        """With "stream": true the response is a stream of server-sent events, each with the name of its type."""

    @router.get(
        _PATH,
        tags=["generation"],
        summary="Show a stored response",
        response_class=Response,
        responses={200: {**DEFAULT_RESPONSES[200], "model": ResponseObject}, **error_responses(400, 404)},
    )
    async def stored_response(response_id: str, request: Request, stream: str = "") -> Response:
        """Show a response of the same API key. It is not streamed again."""
        if stream.lower() == "true":
            raise InvalidRequest("a stored response is not streamed again; remove 'stream'", param="stream")
        found = store.get(response_id, get_principal(request.scope).key)
        return Response(found.body, media_type=JSON)

    @router.delete(
        _PATH, tags=["generation"], summary="Delete a stored response", responses=error_responses(404)
    )
    async def delete_response(response_id: str, request: Request) -> DeletedResponse:
        """Delete a response of the same API key. Responses that continue it still have its conversation."""
        store.delete(response_id, get_principal(request.scope).key)
        return DeletedResponse(id=response_id, object="response", deleted=True)

    @router.post(
        _PATH + "/cancel",
        tags=["generation"],
        summary="Cancel a response in the background",
        responses=error_responses(400, 404),
    )
    async def cancel_response(response_id: str, request: Request) -> None:
        """Return an error: there are no responses in the background. A client cancels its request by disconnecting."""
        store.get(response_id, get_principal(request.scope).key)
        raise InvalidRequest(
            "only responses in the background can be cancelled, and this one has ended; end a running one by "
            f"disconnecting, or with POST {contract.PATH_ABORT}"
        )

    @router.get(
        _PATH + "/input_items",
        tags=["generation"],
        summary="List the input items of a stored response",
        response_class=Response,
        responses={200: {**DEFAULT_RESPONSES[200], "model": ItemList}, **error_responses(400, 404)},
    )
    async def input_items(
        response_id: str,
        request: Request,
        after: Annotated[str, Query(description="Begin after the item with this id.")] = "",
        limit: Annotated[str, Query(description=f"1 to {MAX_LISTED_ITEMS}.")] = str(DEFAULT_LISTED_ITEMS),
        order: Annotated[str, Query(description="asc or desc.")] = "desc",
    ) -> Response:
        """List the items that the request itself sent, without those of the responses that it continues."""
        found = store.get(response_id, get_principal(request.scope).key)
        page = _list_items(found.load_input(), after=after, limit=_parse_limit(limit), order=order)
        return Response(encode_json(page), media_type=JSON)

    router.include_router(generation)
    return router


def _parse_limit(text: str) -> int:
    limit = int(text) if re.fullmatch("[0-9]{1,3}", text) else 0
    if not 1 <= limit <= MAX_LISTED_ITEMS:
        raise InvalidRequest(f"'limit' must be a number from 1 to {MAX_LISTED_ITEMS}", param="limit")
    return limit


def _list_items(items: list[dict[str, Any]], *, after: str, limit: int, order: str) -> dict[str, Any]:
    """Return one page of items. Raises ``InvalidRequest``."""
    if order not in ("asc", "desc"):
        raise InvalidRequest('\'order\' must be "asc" or "desc"', param="order")
    if order == "desc":
        items = items[::-1]
    ids = [item["id"] for item in items]
    if after and after not in ids:
        raise InvalidRequest("'after' is not the id of an input item of this response", param="after")
    start = ids.index(after) + 1 if after else 0
    page = items[start : start + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else "",
        "last_id": page[-1]["id"] if page else "",
        "has_more": start + limit < len(items),
    }
