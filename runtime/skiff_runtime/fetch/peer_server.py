"""HTTP server of a fetcher: its progress for the operator, and the verified files of its one model for other nodes.

Files need the token that all fetchers of the model share; progress and probes contain nothing secret. The server only
reads, and a name is looked up among those of the model, so no request can name another file of the disk.
"""

import hmac
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Literal

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Route

from skiff_runtime import log
from skiff_runtime.contract import (
    FLAG_SERVE_PEERS,
    PATH_LIVEZ,
    PATH_PEER_FILES,
    PATH_PEER_MANIFEST,
    PATH_PEER_STATUS,
    PATH_READYZ,
)
from skiff_runtime.errors import FetchError
from skiff_runtime.hub.hub_reference import parse_reference
from skiff_runtime.hub.model_cache import ModelCache
from skiff_runtime.hub.peer_client import manifest_model
from skiff_runtime.hub.peer_protocol import PeerFile, PeerManifest
from skiff_runtime.hub.repository import RepositoryListing
from skiff_runtime.sources.directory_cache import DirectoryCache
from skiff_runtime.sources.source_reference import is_source_uri, parse_source
from skiff_runtime.transfer.download_progress import current_progress

MAX_CONNECTIONS: Final = 128
"""Beyond it a request is answered with 503, and the peer tries again. One peer uses four connections."""
_STOP_SECONDS: Final = 5.0


class PeerStatus(msgspec.Struct, frozen=True):
    """The state of a fetcher: ``complete`` when the verified model is on its disk. Bytes are 0 until they are known."""

    state: Literal["fetching", "complete"]
    received_bytes: int
    total_bytes: int
    commit: str = ""


@dataclass(frozen=True, slots=True)
class OfferedModel:
    """A model as peers know it, and the part of the cache directory that holds it."""

    name: str
    cache: ModelCache | DirectoryCache

    def prepare(self) -> None:
        """Compute the digests by which peers verify the files, where the source of the model gave none."""
        if isinstance(self.cache, DirectoryCache):
            self.cache.complete_digests()


def offered_model(uri: str, revision: str | None, cache_dir: Path) -> OfferedModel:
    """Return the model of a URI in ``cache_dir``. Raises ``ConfigError``."""
    if is_source_uri(uri):
        source = parse_source(uri)
        return OfferedModel(str(source), DirectoryCache(cache_dir, source))
    reference = parse_reference(uri, revision)
    return OfferedModel(manifest_model(reference), ModelCache(cache_dir, reference))


class _ModelFile(FileResponse):
    chunk_size = 1 << 20


class PeerServer:
    """The server, in a thread of its own. As a context manager it listens inside the block."""

    def __init__(self, model: OfferedModel, *, token: str, host: str, port: int) -> None:
        """Listen at once, so that a port that is in use ends the command. Raises ``FetchError``."""
        self._cache = model.cache
        self._model = model.name
        self._authorization = f"Bearer {token}".encode()
        self._listing: RepositoryListing | None = None
        try:
            self._socket = socket.create_server((host, port))
        except OSError as error:
            raise FetchError(
                f"{FLAG_SERVE_PEERS} {port}: {error.strerror or error}; use another port"
            ) from error
        settings = uvicorn.Config(
            self._app(),
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_graceful_shutdown=int(_STOP_SECONDS),
        )
        self._server = uvicorn.Server(settings)
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="peer-server", daemon=True
        )

    @property
    def port(self) -> int:
        """The port on which it listens."""
        port: int = self._socket.getsockname()[1]
        return port

    def __enter__(self) -> "PeerServer":
        self._thread.start()
        log.event("peer_server_started", port=self.port)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.should_exit = True
        self._thread.join(2 * _STOP_SECONDS)
        self._socket.close()

    def offer(self) -> bool:
        """Offer the model if its verified files are complete on the disk, else offer nothing; return whether they are."""
        self._listing = self._cache.list_verified()
        return self._listing is not None

    def _app(self) -> Starlette:
        return Starlette(
            routes=[
                Route(PATH_LIVEZ, self._livez),
                Route(PATH_READYZ, self._readyz),
                Route(PATH_PEER_STATUS, self._status),
                Route(PATH_PEER_MANIFEST, self._guarded(self._manifest)),
                Route(f"{PATH_PEER_FILES}/{{commit}}/{{name:path}}", self._guarded(self._file)),
            ]
        )

    def _guarded(
        self, answer: Callable[[Request, RepositoryListing], Response]
    ) -> Callable[[Request], Response]:
        """Return a handler that needs the token and the complete model. Starlette runs it in a thread."""

        def handler(request: Request) -> Response:
            given = request.headers.get("Authorization", "").encode()
            if not hmac.compare_digest(given, self._authorization):
                return PlainTextResponse("this needs the token that the fetchers of the model share", 401)
            listing = self._listing
            if listing is None:
                return PlainTextResponse("the model is not complete yet", 503)
            return answer(request, listing)

        return handler

    def _livez(self, _: Request) -> Response:
        return PlainTextResponse("ok")

    def _readyz(self, _: Request) -> Response:
        ready = self._listing is not None
        return PlainTextResponse("ok" if ready else "the model is not complete yet", 200 if ready else 503)

    def _status(self, _: Request) -> Response:
        listing = self._listing
        if listing is not None:
            total = sum(file.size_bytes for file in listing.files)
            status = PeerStatus("complete", total, total, listing.commit)
        else:
            progress = current_progress()
            status = PeerStatus("fetching", *(progress or (0, 0)))
        return _json(status)

    def _manifest(self, _: Request, listing: RepositoryListing) -> Response:
        files = [PeerFile(file.name, file.size_bytes, file.digest) for file in listing.files]
        return _json(PeerManifest(self._model, listing.commit, files))

    def _file(self, request: Request, listing: RepositoryListing) -> Response:
        commit, name = request.path_params["commit"], request.path_params["name"]
        if commit != listing.commit or all(file.name != name for file in listing.files):
            return PlainTextResponse("the model has no such file", 404)
        path = self._cache.snapshot(commit) / name
        try:
            state = path.stat()
        except OSError:
            return PlainTextResponse("the file is gone from the disk", 503)
        return _ModelFile(path, media_type="application/octet-stream", stat_result=state)


def _json(body: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
