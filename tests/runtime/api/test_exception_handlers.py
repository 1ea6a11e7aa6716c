"""Errors of FastAPI's path operations: one shape, and a count of those that are refusals."""

import asyncio

import httpx
import pytest
from fastapi import FastAPI

from skiff_runtime.api.routes.exception_handlers import add_exception_handlers
from skiff_runtime.errors import InternalError, ModelNotFound, QueueFull, Unavailable


def ask(error: Exception) -> tuple[httpx.Response, list[int]]:
    """The reply of a path operation that raises ``error``, and the refusals that were counted."""
    app, refused = FastAPI(), list[int]()
    add_exception_handlers(app, refused.append)

    @app.get("/broken")
    async def broken() -> None:
        raise error

    async def get() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.get("/broken")

    return asyncio.run(get()), refused


@pytest.mark.parametrize(
    ("error", "status", "retry"),
    [
        (QueueFull("later", retry_after_seconds=7), 429, "7"),
        (Unavailable("starting"), 503, "1"),
        (ModelNotFound("no such model"), 404, None),
    ],
)
def test_a_refusal_is_counted(error: Exception, status: int, retry: str | None) -> None:
    response, refused = ask(error)
    assert (response.status_code, response.headers.get("retry-after"), refused) == (status, retry, [status])
    assert response.json()["error"]["message"] == str(error)


@pytest.mark.parametrize("error", [InternalError("a rank died"), RuntimeError("fault of ours")])
def test_a_failure_is_no_refusal(error: Exception) -> None:
    response, refused = ask(error)
    assert (response.status_code, refused) == (500, [])
    assert response.json()["error"]["code"] == "internal_error"
    assert "fault of ours" not in response.text
