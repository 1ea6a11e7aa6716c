"""Reflector: lists one kind in one namespace, watches it from that resource version, and passes events on in order.

This is the only file that uses internals of kopf. kopf provides the process, discovery, credentials and the requests;
its own loop around them (`infinite_watch`) is replaced while the operator runs, for four reasons: it does not report
the end of a list to handlers, so a deletion without an event could not be detected; its queues, one for each object,
lose the order of events and list ends; it hides bookmarks, the only activity of an idle watch; and any API error other
than 410 in the stream ends the process.
"""

import asyncio
import contextlib
import inspect
import logging
import pkgutil
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import replace
from importlib.metadata import version
from typing import Any, Final, Literal, NoReturn

import aiohttp
import kopf
import msgspec
from kopf._cogs.clients import api, errors, watching
from kopf._cogs.structs import references
from kopf._core.reactor import queueing

from skiff_operator.client import retry_after_seconds
from skiff_operator.errors import OperatorError
from skiff_operator.kinds import INFERENCE_SERVICE, LORA_ADAPTER, Kind
from skiff_operator.log import logger
from skiff_operator.watch_streams import EventHandler, StreamKey

BORROWED: Final = {
    "kopf._cogs.clients.watching.infinite_watch": {"settings", "resource", "namespace", "operator_paused"},
    "kopf._cogs.clients.api.request": {"method", "url", "settings", "timeout", "logger"},
    "kopf._cogs.clients.api.iter_jsonlines": {"content"},
    "kopf._cogs.structs.references.Resource.get_url": {"namespace", "params"},
}
"""kopf's internal functions in use, with the parameters that they must have."""

FIRST_RETRY_SECONDS: Final = 0.1
LAST_RETRY_SECONDS: Final = 30.0
_STABLE_SECONDS: Final = 5.0
_GONE: Final = 410
_FAILURES: Final = (errors.APIError, aiohttp.ClientError, TimeoutError, msgspec.DecodeError)

_requests = logging.getLogger("skiff_operator.requests")
_requests.setLevel(logging.CRITICAL)  # kopf logs each failed request, and the reflector reports it, too


class StreamError(Exception):
    """An ERROR event of a watch; `status` is its HTTP code."""

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


def check() -> None:
    """Check that kopf's internals have the expected shape.

    Raises:
        OperatorError: the internals of this version of kopf differ.
    """
    wrong = [name for name, parameters in BORROWED.items() if not parameters <= _parameters(name)]
    if "infinite_watch" not in queueing.watcher.__code__.co_names:
        wrong.append("kopf._core.reactor.queueing.watcher, which must call watching.infinite_watch")
    if not hasattr(getattr(watching, "Bookmark", None), "LISTED"):
        wrong.append("kopf._cogs.clients.watching.Bookmark.LISTED")
    insights = getattr(references, "Insights", None)
    if not {"ready_resources", "watched_resources"} <= set(getattr(insights, "__dataclass_fields__", ())):
        wrong.append("kopf._cogs.structs.references.Insights, with ready_resources and watched_resources")
    if not {"status", "headers"} <= set(dir(getattr(errors, "APIError", None))):
        wrong.append("kopf._cogs.clients.errors.APIError, with status and headers")
    if wrong:
        raise OperatorError(f"kopf {version('kopf')} lacks what this operator uses of it: {'; '.join(wrong)}")


async def run(
    handler: EventHandler,
    registry: kopf.OperatorRegistry,
    settings: kopf.OperatorSettings,
    namespaces: tuple[str, ...],
) -> None:
    """Run kopf, with its watches reflected into `handler`, until a signal ends it or this task is cancelled.

    Raises:
        OperatorError: kopf's internals differ, the API server lacks a kind, or the credentials are invalid.
    """
    check()
    insights = references.Insights()
    with _reflected(handler):
        operator = asyncio.create_task(
            kopf.operator(
                registry=registry,
                settings=settings,
                insights=insights,
                standalone=True,
                clusterwide=not namespaces,
                namespaces=namespaces,
            )
        )
        discovered = asyncio.create_task(insights.ready_resources.wait())
        try:
            await asyncio.wait({operator, discovered}, return_when=asyncio.FIRST_COMPLETED)
            if not operator.done():
                _require_kinds(handler.streams.kinds, insights.watched_resources)
            await operator
        except kopf.LoginError as error:
            raise OperatorError(f"the API server accepts no credentials of this process: {error}") from error
        except errors.APIError as error:
            raise OperatorError(f"the API server refused to say which kinds it serves: {error!r}") from error
        finally:
            discovered.cancel()
            operator.cancel()
            await asyncio.wait({operator, discovered})


@contextlib.contextmanager
def _reflected(handler: EventHandler) -> Iterator[None]:
    """Replace kopf's loop of lists and watches by `Reflector` inside the block."""
    kinds = {(kind.group, kind.version, kind.plural): kind for kind in handler.streams.kinds}
    original = watching.infinite_watch

    def reflect(
        *, settings: kopf.OperatorSettings, resource: Any, namespace: str | None, **_: Any
    ) -> AsyncIterator[Any]:
        kind = kinds[resource.group, resource.version, resource.plural]
        return Reflector(handler, StreamKey(kind, namespace), settings, resource).reflect()

    watching.infinite_watch = reflect
    try:
        yield
    finally:
        watching.infinite_watch = original


_EncodedObject = dict[str, msgspec.Raw]
"""An object whose fields are not decoded yet."""


class _WatchEvent(msgspec.Struct):
    """One line of a watch."""

    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR"]
    object: _EncodedObject


class _ListMeta(msgspec.Struct, rename={"resource_version": "resourceVersion", "token": "continue"}):
    """The metadata of one page of a list; `token` is empty on the last one."""

    resource_version: str
    token: str = ""


class _Page(msgspec.Struct):
    """One page of a list."""

    metadata: _ListMeta
    items: list[_EncodedObject] | None = None


_WATCH_EVENT: Final = msgspec.json.Decoder(_WatchEvent)
_PAGE: Final = msgspec.json.Decoder(_Page)
_FIELDS: Final = msgspec.json.Decoder(_EncodedObject)
_ANY: Final = msgspec.json.Decoder()


def decode_object(encoded: _EncodedObject) -> dict[str, Any]:
    """Decode an object of a list or a watch without its `managedFields`: half of its size, and not read there."""
    obj = {field: _ANY.decode(raw) for field, raw in encoded.items() if field != "metadata"}
    metadata = _FIELDS.decode(encoded.get("metadata", b"{}"))
    obj["metadata"] = {field: _ANY.decode(raw) for field, raw in metadata.items() if field != "managedFields"}
    return obj


class Reflector:
    """One stream: a list, watch requests from its resource version on, and a new list when that is too old.

    Every failure is retried, with a backoff from 0.1 s to 30 s, or the server's Retry-After if longer. Pages, events,
    bookmarks and any response to a request count as activity: an idle watch may deliver no bookmark at all, but it is
    requested again periodically.
    """

    def __init__(
        self, handler: EventHandler, stream: StreamKey, settings: kopf.OperatorSettings, resource: Any
    ) -> None:
        """Reflect `resource`, as kopf discovered it, into `handler`."""
        self._handler = handler
        self._stream = stream
        self._resource = resource
        self._watching = settings.watching
        # Retries happen here, where they can be reported, and not inside kopf's requests.
        self._settings = replace(settings, networking=replace(settings.networking, error_backoffs=()))
        self._failures = 0

    async def reflect(self) -> AsyncIterator[watching.Bookmark]:
        """List and watch for ever; kopf's own watcher receives only the ends of lists."""
        await self._handler.streams.may_begin(self._stream)
        while True:
            try:
                resource_version = await self._list()
                yield watching.Bookmark.LISTED
                await self._watch(resource_version)
            except (*_FAILURES, StreamError) as error:
                if getattr(error, "status", None) == _GONE:
                    logger.info(
                        "resource version expired, listing again", extra={"stream": str(self._stream)}
                    )
                    await asyncio.sleep(self._delay())
                else:
                    await self._pause(error)

    async def _list(self) -> str:
        """List all objects page by page; return the resource version of the list."""
        shown: set[str] = set()
        params = {"limit": str(self._watching.chunk_size), "labelSelector": self._selector}
        while True:
            page = await self._page({name: text for name, text in params.items() if text})
            self._handler.streams.record_activity(self._stream)
            self._pass_on(page.items or [], shown)
            resource_version, params["continue"] = page.metadata.resource_version, page.metadata.token
            del page  # or else two pages would be in memory while the next one is read
            if not params["continue"]:
                break
        self._handler.on_listed(self._stream, shown, int(resource_version))
        return resource_version

    def _pass_on(self, items: list[_EncodedObject], shown: set[str]) -> None:
        """Pass on the objects of one page, and add their uids to `shown`."""
        kind = self._stream.kind
        identity = {"apiVersion": kind.api_version, "kind": kind.name}  # the items of a list lack both
        for item in items:
            obj = identity | decode_object(item)
            shown.add(obj["metadata"]["uid"])
            self._handler.on_event(kind, "LISTED", obj)

    async def _watch(self, resource_version: str) -> NoReturn:
        """Receive events over any number of requests; an interrupted watch resumes after its last event.

        Raises:
            StreamError, APIError: the server cannot resume the watch, so a new list is needed.
        """
        while True:
            began = time.monotonic()
            failure: Exception | None = None
            try:
                async with await self._open_watch(resource_version) as response:
                    self._handler.streams.record_activity(self._stream)
                    async for line in api.iter_jsonlines(response.content):
                        resource_version = self._take(_WATCH_EVENT.decode(line))
            except aiohttp.SocketTimeoutError:
                pass  # either nothing happened or the connection is dead: only a new request shows which
            except _FAILURES as error:
                if getattr(error, "status", None) == _GONE:
                    raise
                failure = error
            if time.monotonic() - began > _STABLE_SECONDS:
                self._failures = 0
            if failure is None:
                await asyncio.sleep(self._delay())
            else:
                await self._pause(failure)

    async def _page(self, params: dict[str, str]) -> _Page:
        """Request one page of the list."""
        networking = self._settings.networking
        timeout = aiohttp.ClientTimeout(
            total=networking.request_timeout, sock_connect=networking.connect_timeout
        )
        async with await self._request(params, timeout) as response:
            return _PAGE.decode(await response.read())

    async def _open_watch(self, resource_version: str) -> aiohttp.ClientResponse:
        params = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(self._watching.server_timeout),
            "labelSelector": self._selector,
        }
        timeout = aiohttp.ClientTimeout(
            total=None,
            sock_connect=self._watching.connect_timeout,
            sock_read=self._watching.inactivity_timeout,
        )
        return await self._request(params, timeout)

    async def _request(
        self, params: dict[str, str], timeout: aiohttp.ClientTimeout
    ) -> aiohttp.ClientResponse:
        url = self._resource.get_url(namespace=self._stream.namespace, params=params)
        reply: aiohttp.ClientResponse = await api.request(
            "get", url, settings=self._settings, timeout=timeout, logger=_requests
        )
        return reply

    @property
    def _selector(self) -> str:
        return ",".join(self._watching.label_selectors.collect(self._resource))

    def _take(self, event: _WatchEvent) -> str:
        """Pass on an event, and return the resource version to go on from."""
        obj = decode_object(event.object)
        if event.type == "ERROR":
            raise StreamError(obj.get("message", str(obj)), status=obj.get("code", 0))
        self._handler.streams.record_activity(self._stream)
        self._failures = 0
        if event.type != "BOOKMARK":
            self._handler.on_event(self._stream.kind, event.type, obj)
        resource_version: str = obj["metadata"]["resourceVersion"]
        return resource_version

    async def _pause(self, error: Exception) -> None:
        """Report a failure and wait."""
        answered = isinstance(error, errors.APIError)
        asked = retry_after_seconds(error.headers) if isinstance(error, errors.APIError) else 0.0
        delay = min(max(self._delay(), asked), self._last_delay)
        self._handler.streams.failed(self._stream, str(error) or repr(error), answered=answered)
        extra = {"stream": str(self._stream), "error": repr(error), "retry_seconds": f"{delay:.1f}"}
        logger.warning("watch failed", extra=extra)
        await asyncio.sleep(delay)

    @property
    def _last_delay(self) -> float:
        """Return the longest delay: a refused stream must show activity before it would count as dead."""
        return min(LAST_RETRY_SECONDS, float(self._watching.inactivity_timeout))

    def _delay(self) -> float:
        """Return the seconds until the next attempt; they double each time."""
        delay = FIRST_RETRY_SECONDS * 2.0 ** min(self._failures, 20)
        self._failures += 1
        return min(delay, self._last_delay)


def _require_kinds(kinds: Iterable[Kind], found: set[Any]) -> None:
    served = {(each.group, each.version, each.plural) for each in found}
    for kind in kinds:
        if (kind.group, kind.version, kind.plural) not in served:
            advice = (
                "; apply manifests/crds first (the chart does it by itself)"
                if kind in (INFERENCE_SERVICE, LORA_ADAPTER)
                else ""
            )
            raise OperatorError(
                f"the API server does not know {kind.plural}.{kind.group or kind.version}{advice}"
            )


def _parameters(name: str) -> set[str]:
    """Return the parameters of a function by its dotted name; none when there is no such function."""
    try:
        return set(inspect.signature(pkgutil.resolve_name(name)).parameters)
    except (ImportError, AttributeError, TypeError):
        return set()
