"""JSON bodies of FastAPI's path operations: read within limits, and validated once, on the bytes as they came.

FastAPI itself reads a body of any size, and parses it with Python's parser before the model sees it. Here each body
goes the way of those of the generation endpoints: the same limits, the same validator, the same messages, whatever its
Content-Type says.
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
Serve = Callable[[Request], Coroutine[Any, Any, Response]]


class _FromJson:
    """A mark for pydantic: bytes are JSON of the model that is marked."""

    def __get_pydantic_core_schema__(
        self, source: type[StrictModel], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        def from_json(value: object) -> object:
            return parse_body(source, value) if isinstance(value, bytes) else value

        return core_schema.no_info_before_validator_function(from_json, handler(source))


JsonBody = Annotated[Body, _FromJson()]
"""The type of a path operation's body. A fault in it raises ``InvalidRequest``."""


class _BytesRequest(Request):
    """A request whose body was read already and is passed on unparsed."""

    def __init__(self, request: Request, raw: bytes) -> None:
        super().__init__(request.scope, request.receive)
        self._raw = raw

    async def body(self) -> bytes:
        """Return the bytes."""
        return self._raw

    async def json(self) -> bytes:
        """Return the bytes, for ``JsonBody`` to parse."""
        return self._raw


class BoundedRoute(APIRoute):
    """A path operation whose body is read by the application's ``BodyReader`` (``app.state.body``)."""

    def get_route_handler(self) -> Serve:
        """Return FastAPI's handler, behind the reading of the body."""
        handle = cast(Callable[[Request], Awaitable[Response]], super().get_route_handler())

        async def bounded(request: Request) -> Response:
            reader: BodyReader = request.app.state.body
            try:
                raw = await reader.read(request.scope["headers"], request.receive)
            except ClientDisconnected:
                return Response(status_code=CLIENT_CLOSED_REQUEST)
            return await handle(_BytesRequest(request, raw))

        return bounded
