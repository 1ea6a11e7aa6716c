"""POST /abort and /flush_cache: for whoever runs the service, or wants an answer no more."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from skiff_runtime import log
from skiff_runtime.api.dispatcher import Dispatcher
from skiff_runtime.api.queries import Queries
from skiff_runtime.api.schemas import Strict
from skiff_runtime.api.validation import parse
from skiff_runtime.messages import FlushCache, Flushed


class AbortBody(Strict):
    """POST /abort. ``request_id``: the X-Request-Id of a request, or the id of its reply; or ``all`` of them."""

    request_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    all: Literal[True] | None = None

    @model_validator(mode="after")
    def _one_target(self) -> Self:
        if (self.request_id is None) == (self.all is None):
            raise PydanticCustomError("target", "send either 'request_id' or \"all\": true")
        return self


class ControlActions:
    """What the two endpoints do."""

    def __init__(self, dispatcher: Dispatcher, queries: Queries) -> None:
        self._dispatcher = dispatcher
        self._queries = queries

    async def abort(self, raw: bytes) -> dict[str, object]:
        """End requests; their clients get what there is, with the finish reason "abort"."""
        body = parse(AbortBody, raw)
        count = self._dispatcher.end_early(body.request_id)
        log.event("abort", request_id=body.request_id or "all", aborted=count)
        return {"aborted": count}

    async def flush_cache(self, _raw: bytes) -> dict[str, object]:
        """Forget every cached prefix that no request holds."""
        told = await self._queries.ask(FlushCache)
        assert isinstance(told, Flushed)
        log.event("cache_flushed", pages=told.pages, running=told.running)
        return {"pages": told.pages, "running": told.running}
