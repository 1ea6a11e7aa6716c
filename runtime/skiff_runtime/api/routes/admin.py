"""Administration: POST /abort ends requests early, POST /flush_cache empties the prefix cache."""

from typing import Annotated, Literal, Self

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from skiff_runtime import contract, log
from skiff_runtime.api.dispatch.dispatcher import Dispatcher
from skiff_runtime.api.dispatch.rpc import RpcClient
from skiff_runtime.api.http.auth import get_principal
from skiff_runtime.api.routes.json_body import BoundedRoute, JsonBody
from skiff_runtime.api.routes.openapi import error_responses
from skiff_runtime.api.schemas.request_bodies import StrictModel, exactly_one
from skiff_runtime.messages import FlushCache, Flushed


class AbortBody(StrictModel):
    """Body of POST /abort. ``request_id``: an X-Request-Id, or the ID of a response; or ``all`` requests."""

    model_config = ConfigDict(json_schema_extra=exactly_one("request_id", "all"))

    request_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    all: Literal[True] | None = None

    @model_validator(mode="after")
    def _has_one_target(self) -> Self:
        if (self.request_id is None) == (self.all is None):
            raise PydanticCustomError("target", "send either 'request_id' or \"all\": true")
        return self


class AbortResponse(BaseModel):
    """Number of requests that were aborted."""

    aborted: int


class FlushCacheResponse(BaseModel):
    """Number of pages of the KV cache that were freed, and of running requests, which keep theirs."""

    pages: int
    running: int


def make_admin_routes(dispatcher: Dispatcher, rpc: RpcClient) -> APIRouter:
    """Return the operations that act on the requests of others."""
    router = APIRouter(tags=["administration"], route_class=BoundedRoute)

    @router.post(
        contract.PATH_ABORT, summary="End requests early", responses=error_responses(400, 403, 408, 413)
    )
    async def abort(body: JsonBody[AbortBody], request: Request) -> AbortResponse:
        """End one request, by its X-Request-Id or by the ID of its response, or all. Clients get the text so far.

        An API key may end its own requests; those of others need an admin key. Without keys, clients cannot be distinguished.
        """
        principal = get_principal(request.scope)
        if body.all or not principal.key:
            principal.require_admin()
        count = dispatcher.abort_requests(body.request_id, key=None if principal.admin else principal.key)
        log.event("requests_aborted", request_id=body.request_id or "all", aborted=count)
        return AbortResponse(aborted=count)

    @router.post(
        contract.PATH_FLUSH_CACHE,
        summary="Empty the prefix cache",
        responses=error_responses(403, 408, 413, 429, 500, 503),
    )
    async def flush_cache(request: Request) -> FlushCacheResponse:
        """Free every page of the prefix cache that no request uses. Needs an admin key; the body is ignored."""
        get_principal(request.scope).require_admin()
        flushed = await rpc.call(FlushCache)
        assert isinstance(flushed, Flushed)
        log.event("cache_flushed", pages=flushed.pages, running=flushed.running)
        return FlushCacheResponse(pages=flushed.pages, running=flushed.running)

    return router
