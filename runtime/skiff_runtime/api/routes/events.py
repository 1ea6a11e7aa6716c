"""GET /events: the stream by which routers follow this pod. Like generation, it bypasses FastAPI, which documents it."""

from typing import Annotated, Final, Literal
from urllib.parse import parse_qs

from fastapi import APIRouter, Query, Response
from pydantic import Field
from pydantic.json_schema import SkipJsonSchema

from skiff_runtime import contract
from skiff_runtime.api.dispatch.state_stream import StateStream
from skiff_runtime.api.http.asgi import Receive, Scope, Send
from skiff_runtime.api.http.responses import send_error
from skiff_runtime.api.http.router_header import ROUTER_ID
from skiff_runtime.api.routes.exchange import Exchange
from skiff_runtime.api.routes.openapi import error_responses, text_response
from skiff_runtime.errors import InvalidRequest, RequestError
from skiff_runtime.state_events import INCLUDE_KV_BLOCKS, INCLUDE_PROMPT_BLOCKS

EVENT_STREAM: Final = "text/event-stream"
_INCLUDED: Final = (INCLUDE_PROMPT_BLOCKS, INCLUDE_KV_BLOCKS)


class EventsEndpoint:
    """The ASGI application of the path."""

    def __init__(self, events: StateStream) -> None:
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one subscriber until it leaves, reads too slowly, or the server exits."""
        try:
            query = parse_qs(scope["query_string"].decode("latin-1"))
            included, router_id = _parse_included(query), _parse_router_id(query)
            self._events.check_has_room()
        except RequestError as error:
            await send_error(scope, send, error)
            return
        exchange = Exchange(scope, send)
        headers = [
            (b"content-type", EVENT_STREAM.encode()),
            (b"cache-control", b"no-store"),
            *exchange.headers,
        ]
        exchange.writer.start(200, headers)
        subscriber = self._events.subscribe(
            exchange.writer,
            prompt_blocks=INCLUDE_PROMPT_BLOCKS in included,
            kv_blocks=INCLUDE_KV_BLOCKS in included,
            router_id=router_id,
        )
        try:
            await exchange.wait_until_over(receive)
        finally:
            self._events.unsubscribe(subscriber)


def _parse_included(query: dict[str, list[str]]) -> list[str]:
    """Return the values of ``include``. Raises ``InvalidRequest`` for one that is not known."""
    included = query.get("include", [])
    for each in included:
        if each not in _INCLUDED:
            raise InvalidRequest(
                f"'include' is {each!r}; it can be {' or '.join(_INCLUDED)}", param="include"
            )
    return included


def _parse_router_id(query: dict[str, list[str]]) -> str:
    """Return the value of ``router``, or "". Raises ``InvalidRequest`` for one that no header could repeat."""
    router_id = query.get("router", [""])[-1]
    if router_id and not ROUTER_ID.fullmatch(router_id):
        raise InvalidRequest(
            "'router' must be 1 to 64 letters, digits and hyphens: the ID in the X-Skiff-Router headers of its requests",
            param="router",
        )
    return router_id


def make_event_routes() -> APIRouter:
    """Return the route that documents the stream, and is never called."""
    router = APIRouter(tags=["probes"])

    @router.get(
        contract.PATH_EVENTS,
        summary="Follow the pod's state",
        response_class=Response,
        responses={**text_response(EVENT_STREAM), **error_responses(400, 503)},
    )
    async def events(
        include: Annotated[list[Literal["prompt_blocks", "kv_blocks"]] | None, Query()] = None,
        router: Annotated[
            Annotated[str, Field(pattern=f"^{ROUTER_ID.pattern}$")] | SkipJsonSchema[None], Query()
        ] = None,
    ) -> None:
        """Stream load and state as they change, for routers, with the content of the prefix cache if it is included.

        The first event is a snapshot. The stream ends with the service, and for a client that reads too slowly. With `router`,
        the ID in the X-Skiff-Router headers of a router's requests (`ID/NUMBER`), each load lists the numbers of the requests
        that it is the first to include.
        """

    return router
