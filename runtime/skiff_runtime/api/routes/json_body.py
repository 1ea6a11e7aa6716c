"""JSON bodies of FastAPI's path operations: read within limits, and validated once, from the raw bytes.

FastAPI itself reads a body of any size, and parses it with Python's parser before the model sees it. Here each body is
handled as on the generation endpoints: the same limits, the same validator and the same messages, whatever its
Content-Type.
"""

from collections.abc import Awaitable, Callable, Coroutine
from typing import Annotated, Any, TypeVar, cast

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from skiff_runtime.api.http.request_body import BodyReader, ClientDisconnected
from skiff_runtime.api.schemas.request_bodies import StrictModel
from skiff_runtime.api.schemas.validation import parse_body
from skiff_runtime.errors import CLIENT_CLOSED_REQUEST

Body = TypeVar("Body", bound=StrictModel)
RouteHandler = Callable[[Request], Coroutine[Any, Any, Response]]


class _ParseJson:
    """A pydantic annotation: bytes are parsed as JSON of the annotated model."""

    def __get_pydantic_core_schema__(
        self, source: type[StrictModel], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        def parse(value: object) -> object:
            return parse_body(source, value) if isinstance(value, bytes) else value

        return core_schema.no_info_before_validator_function(parse, handler(source))


JsonBody = Annotated[Body, _ParseJson()]
"""The type of a path operation's body. An invalid body raises ``InvalidRequest``."""


class _RawRequest(Request):
    """A request whose body was read already, and is passed on unparsed."""

    def __init__(self, request: Request, raw: bytes) -> None:
        super().__init__(request.scope, request.receive)
        self._raw = raw

    async def body(self) -> bytes:
        """Return the raw body."""
        return self._raw

    async def json(self) -> bytes:
        """Return the raw body, which ``JsonBody`` parses."""
        return self._raw


class BoundedRoute(APIRoute):
    """A path operation whose body is read by the application's ``BodyReader`` (``app.state.body``)."""

    def get_route_handler(self) -> RouteHandler:
        """Return FastAPI's handler, preceded by reading the body."""
        handle = cast(Callable[[Request], Awaitable[Response]], super().get_route_handler())

        async def read_and_handle(request: Request) -> Response:
            reader: BodyReader = request.app.state.body
            try:
                raw = await reader.read(request.scope, request.receive)
            except ClientDisconnected:
                return Response(status_code=CLIENT_CLOSED_REQUEST)
            return await handle(_RawRequest(request, raw))

        return read_and_handle
