"""ASGI middleware around the FastAPI application; the generation endpoints do without it."""

import asyncio

from fastapi import FastAPI

from skiff_runtime import contract
from skiff_runtime.api.http.asgi import Message, Send
from skiff_runtime.api.http.middleware import App
from skiff_runtime.api.http.request_body import Receive, Scope
from skiff_runtime.api.http.responses import get_response_headers


class ResponseHeadersMiddleware:
    """Adds to every response the headers that the gate laid down for it, and serves HEAD as GET.

    The server leaves the body out of a reply to HEAD.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *get_response_headers(scope)]
            await send(message)

        served = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        await self._app(served, receive, send_with_headers)


class OpenApiMiddleware:
    """Makes the OpenAPI document on a thread when it is first asked for.

    FastAPI would make it on the event loop, where it holds up every stream for 0.14 s; made at the start it would cost
    that time and 4.5 MiB of every service, most of which never show it.
    """

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        self._making = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["path"] == contract.PATH_OPENAPI:
            async with self._making:
                if self._app.openapi_schema is None:
                    await asyncio.to_thread(self._app.openapi)
        await self._app(scope, receive, send)
