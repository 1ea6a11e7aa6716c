"""Exception handlers: errors of path operations have one shape, and rejections are counted."""

import asyncio

import httpx
import pytest
from fastapi import FastAPI

from skiff_runtime.api.routes.exception_handlers import add_exception_handlers
from skiff_runtime.errors import InternalError, ModelNotFound, QueueFull, Unavailable


def get_response(error: Exception) -> tuple[httpx.Response, list[int]]:
    """Return the response of a path operation that raises ``error``, and the rejections that were counted."""
    app, rejected = FastAPI(), list[int]()
    add_exception_handlers(app, rejected.append)

    @app.get("/broken")
    async def broken() -> None:
        raise error

    async def get() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.get("/broken")

    return asyncio.run(get()), rejected


@pytest.mark.parametrize(
    ("error", "status", "retry"),
    [
        (QueueFull("later", retry_after_seconds=7), 429, "7"),
        (Unavailable("starting"), 503, "1"),
        (ModelNotFound("no such model"), 404, None),
    ],
)
def test_rejection_is_counted(error: Exception, status: int, retry: str | None) -> None:
    response, rejected = get_response(error)
    assert (response.status_code, response.headers.get("retry-after"), rejected) == (status, retry, [status])
    assert response.json()["error"]["message"] == str(error)


@pytest.mark.parametrize("error", [InternalError("a rank died"), RuntimeError("secret detail")])
def test_failure_is_no_rejection(error: Exception) -> None:
    response, rejected = get_response(error)
    assert (response.status_code, rejected) == (500, [])
    assert response.json()["error"]["code"] == "internal_error"
    assert "secret detail" not in response.text
