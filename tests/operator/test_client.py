"""The client over HTTP: the errors of an API server that is busy, and the pause that it demands."""

import asyncio

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio.client.configuration import Configuration

from skiff_operator.client import Client
from skiff_operator.errors import ApiBusy, ApiFailed, OperatorError
from skiff_operator.kinds import SERVICE


def error_of(status: int, headers: dict[str, str]) -> OperatorError:
    """Return the error of a read that is answered like this."""

    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"message": "busy"}, status=status, headers=headers)

    async def read() -> OperatorError:
        app = web.Application()
        app.router.add_get("/{path:.*}", answer)
        async with TestServer(app) as server:
            configuration = Configuration(host=str(server.make_url("")).rstrip("/"))
            client = Client(configuration, connections=1)
            try:
                with pytest.raises(OperatorError) as caught:
                    await client.get(SERVICE, "default", "llama")
            finally:
                await client.close()
        return caught.value

    return asyncio.run(read())


@pytest.mark.parametrize(
    ("text", "seconds"), [("7", 7.0), ("Wed, 21 Oct 2026 07:28:00 GMT", 0.0), ("-1", 0.0), (None, 0.0)]
)
@pytest.mark.parametrize(("status", "kind"), [(429, ApiBusy), (503, ApiBusy), (500, ApiFailed)])
def test_a_busy_server_may_demand_a_pause(
    status: int, kind: type[ApiBusy], text: str | None, seconds: float
) -> None:
    error = error_of(status, {} if text is None else {"Retry-After": text})
    assert type(error) is kind
    assert error.retry_after_seconds == seconds
