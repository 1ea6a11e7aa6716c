"""Lists and watches of Kubernetes objects, over the router's own connections: no client library, 2 MiB of code in its place.

A stream lists its kind, and watches from the list's resource version. A watch that ends is begun again; one that expired
(410), or a first one, begins with a list. Whatever fails is tried again with growing pauses, and what is known stays known:
a router without an API server routes as before.
"""

import asyncio
import contextlib
import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, Literal, TypeVar

import msgspec

from skiff_router.upstream import Address, ConnectionPool, Headers, UpstreamError, bearer_line
from skiff_runtime import log
from skiff_runtime.errors import ConfigError, SkiffError

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
PAGE: Final = 500
WATCH_SECONDS: Final = 60
"""Length of one watch. The API server ends it; silence beyond that means that the connection is dead."""
SILENCE_SECONDS: Final = 15.0
REQUEST_SECONDS: Final = 30.0
FIRST_RETRY_SECONDS: Final = 0.2
LAST_RETRY_SECONDS: Final = 10.0
MAX_LINE_BYTES: Final = 8 << 20
_GONE: Final = 410


class Metadata(msgspec.Struct, rename="camel"):
    """The metadata that the router reads."""

    name: str = ""
    namespace: str = ""
    resource_version: str = ""
    labels: dict[str, str] | None = None


class KubernetesObject(msgspec.Struct, rename="camel"):
    """Base of the kinds that the router reads."""

    metadata: Metadata


ObjectT = TypeVar("ObjectT", bound=KubernetesObject)
EventType = Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR"]


class _ListMeta(msgspec.Struct, rename="camel"):
    resource_version: str = ""
    continue_: str = msgspec.field(name="continue", default="")


class _RawList(msgspec.Struct):
    metadata: _ListMeta
    items: list[msgspec.Raw]


class _RawEvent(msgspec.Struct):
    type: EventType
    object: msgspec.Raw


class _Status(msgspec.Struct):
    code: int = 0
    message: str = ""


class ApiError(SkiffError):
    """The API server refused a request, or a watch ended with an ERROR event."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


@dataclass(frozen=True, slots=True)
class ClusterAccess:
    """The API server's address, its TLS context, and the file of the token, which the kubelet renews."""

    address: Address
    tls: ssl.SSLContext | None
    token_file: Path | None

    def token(self) -> str:
        """Return the token of this moment, or "" without one."""
        return self.token_file.read_text().strip() if self.token_file is not None else ""


def in_cluster_access(directory: Path = SERVICE_ACCOUNT) -> ClusterAccess:
    """Return the access of the pod's service account.

    Raises:
        ConfigError: this process does not run in a pod, or the pod has no token.
    """
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT")
    if not host or not port or not (directory / "token").exists():
        raise ConfigError(
            "this is no pod with a service account: give --backend MODEL=http://HOST:PORT instead of --kubernetes"
        )
    tls = ssl.create_default_context(cafile=str(directory / "ca.crt"))
    return ClusterAccess(Address(host, int(port)), tls, directory / "token")


class _Lines:
    """The receiver of a response whose body is passed on in whole lines, or collected if ``on_line`` is None."""

    def __init__(self, on_line: Callable[[bytes], None] | None = None) -> None:
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.heard_at = loop.time()
        self.status = 0
        self._on_line = on_line
        self._rest = b""
        self._body: list[bytes] = []

    @property
    def body(self) -> bytes:
        return b"".join(self._body)

    def on_head(self, status: int, headers: Headers) -> None:
        self.status = status
        self.heard_at = asyncio.get_running_loop().time()

    def on_data(self, data: bytes) -> None:
        self.heard_at = asyncio.get_running_loop().time()
        if self._on_line is None or self.status != 200:
            self._body.append(data)
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        try:
            if len(self._rest) > MAX_LINE_BYTES:
                raise ApiError(0, f"an event of more than {MAX_LINE_BYTES} bytes")
            for line in lines:
                if line:
                    self._on_line(line)
        except (SkiffError, msgspec.DecodeError) as error:
            self._fail(error)

    def on_end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def on_failure(self, error: UpstreamError) -> None:
        self._fail(error)

    def _fail(self, error: Exception) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)


class ObjectStream(Generic[ObjectT]):
    """The objects of one kind in one namespace, or in all."""

    def __init__(
        self,
        access: ClusterAccess,
        path: str,
        kind: type[ObjectT],
        *,
        selector: str,
        on_list: Callable[[list[ObjectT]], None],
        on_event: Callable[[EventType, ObjectT], None],
    ) -> None:
        """``path``: of the collection. ``on_list`` gets all objects, ``on_event`` each later change, in order."""
        self._access = access
        self._path = path
        self._selector = selector
        self._pool = ConnectionPool(access.address, access.tls)
        self._object = msgspec.json.Decoder(kind)
        self._on_list = on_list
        self._on_event = on_event
        self._version = ""
        self.is_synced = False

    async def run(self) -> None:
        """Follow the objects for ever."""
        pause = FIRST_RETRY_SECONDS
        while True:
            try:
                if not self._version:
                    await self._list()
                await self._watch()
                pause = FIRST_RETRY_SECONDS
                continue
            except (ApiError, UpstreamError, TimeoutError, OSError, msgspec.DecodeError) as error:
                expired = isinstance(error, ApiError) and error.status == _GONE
                if expired or not isinstance(error, UpstreamError | TimeoutError):
                    self._version = ""
                if not expired:
                    log.warning("watch_failed", path=self._path, reason=error, retry_seconds=pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LAST_RETRY_SECONDS)

    async def _list(self) -> None:
        objects: list[ObjectT] = []
        token = ""
        while True:
            following = f"&continue={token}" if token else ""
            receiver = _Lines()
            async with asyncio.timeout(REQUEST_SECONDS):
                await self._get(f"limit={PAGE}{following}", receiver)
            _check(receiver)
            page = msgspec.json.decode(receiver.body, type=_RawList)
            objects += [self._object.decode(item) for item in page.items]
            token = page.metadata.continue_
            if not token:
                break
        self._version = page.metadata.resource_version
        self._on_list(objects)
        self.is_synced = True

    async def _watch(self) -> None:
        receiver = _Lines(self._handle)
        query = (
            f"watch=1&allowWatchBookmarks=true&timeoutSeconds={WATCH_SECONDS}&resourceVersion={self._version}"
        )
        limit = WATCH_SECONDS + SILENCE_SECONDS
        async with asyncio.timeout(limit):
            await self._get(query, receiver)
        _check(receiver)

    def _handle(self, line: bytes) -> None:
        event = msgspec.json.decode(line, type=_RawEvent)
        if event.type == "ERROR":
            status = msgspec.json.decode(event.object, type=_Status)
            raise ApiError(status.code, status.message)
        obj = self._object.decode(event.object)
        self._version = obj.metadata.resource_version
        if event.type != "BOOKMARK":
            self._on_event(event.type, obj)

    async def _get(self, query: str, receiver: _Lines) -> None:
        """Send a GET, and return at the end of its response."""
        connection = self._pool.take_idle()
        if connection is None:
            connection = await self._pool.connect()
        head = (
            f"GET {self._path}?labelSelector={self._selector}&{query} HTTP/1.1\r\nhost: {self._access.address}\r\n"
            f"accept: application/json\r\n{bearer_line(self._access.token())}\r\n"
        )
        connection.send((head.encode(),), receiver)
        try:
            await receiver.ended
        except BaseException:
            connection.abort(receiver)
            raise


def _check(receiver: _Lines) -> None:
    if receiver.status != 200:
        message = receiver.body[:500].decode(errors="replace")
        with contextlib.suppress(msgspec.DecodeError):
            message = msgspec.json.decode(receiver.body, type=_Status).message
        raise ApiError(receiver.status, message)
