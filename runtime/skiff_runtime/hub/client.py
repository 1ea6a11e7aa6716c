"""The hub's HTTP API: what Skiff asks of it, and what its refusals mean to the user."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

import httpx

from skiff_runtime import __version__
from skiff_runtime.contract import ENV_HUB_ENDPOINT, ENV_HUB_TOKEN
from skiff_runtime.errors import FetchError
from skiff_runtime.hub.reference import HubReference
from skiff_runtime.hub.retry import Transient, retry_after_seconds

DEFAULT_ENDPOINT: Final = "https://huggingface.co"
MAX_LISTING_BYTES: Final = 32 << 20
MAX_REDIRECTS: Final = 8
_TIMEOUT: Final = httpx.Timeout(connect=10.0, read=20.0, write=10.0, pool=None)
_BUSY: Final = frozenset({408, 429, 500, 502, 503, 504})


@dataclass(frozen=True, slots=True)
class HubAccess:
    """Where the hub is, and the token for it, which ``repr`` and logs never show."""

    endpoint: str = DEFAULT_ENDPOINT
    token: str | None = None

    def __repr__(self) -> str:
        return f"HubAccess({self.endpoint!r}, token={'given' if self.token else None})"


def access_from(environment: Mapping[str, str] = os.environ) -> HubAccess:
    """What HF_ENDPOINT and HF_TOKEN say; FetchError names the one that is malformed."""
    endpoint = environment.get(ENV_HUB_ENDPOINT, "").strip().rstrip("/") or DEFAULT_ENDPOINT
    token = environment.get(ENV_HUB_TOKEN, "").strip() or None
    if not endpoint.startswith(("https://", "http://")) or not httpx.URL(endpoint).host:
        raise FetchError(f"{ENV_HUB_ENDPOINT} must be an http:// or https:// address, not {endpoint!r}")
    # Checked here because an HTTP library's complaint about a header would quote it.
    if token is not None and not (token.isascii() and token.isprintable() and " " not in token):
        raise FetchError(f"{ENV_HUB_TOKEN} holds characters that no token has (it is not shown here)")
    return HubAccess(endpoint, token)


class HubClient:
    """One hub and one model. httpx drops the token when a redirect leads to another host."""

    def __init__(self, access: HubAccess, reference: HubReference) -> None:
        self._access = access
        self._reference = reference
        self._host = httpx.URL(access.endpoint).host
        headers = {"User-Agent": f"skiff/{__version__}", "Accept-Encoding": "identity"}
        if access.token:
            headers["Authorization"] = f"Bearer {access.token}"
        self._http = httpx.Client(
            headers=headers, timeout=_TIMEOUT, follow_redirects=True, max_redirects=MAX_REDIRECTS
        )

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def listing(self) -> bytes:
        """The hub's description of the model at the reference's revision, as JSON."""
        revision = quote(self._reference.revision, safe="")
        body = bytearray()
        with self._get(f"/api/models/{self._reference.model_id}/revision/{revision}?blobs=true") as response:
            for chunk in response.iter_raw():
                body += chunk
                if len(body) > MAX_LISTING_BYTES:
                    raise FetchError(
                        f"the hub's description of {self._reference} exceeds {MAX_LISTING_BYTES} bytes"
                    )
        return bytes(body)

    @contextmanager
    def open_file(self, commit: str, name: str, offset_bytes: int) -> Iterator[tuple[int, Iterator[bytes]]]:
        """A file's bytes and the offset at which they really begin: 0 where a server ignores ranges."""
        headers = {"Range": f"bytes={offset_bytes}-"} if offset_bytes else {}
        path = f"/{self._reference.model_id}/resolve/{commit}/{quote(name)}"
        with self._get(path, headers) as response:
            start = _range_start(response) if response.status_code == httpx.codes.PARTIAL_CONTENT else 0
            yield start, response.iter_raw()

    @contextmanager
    def _get(self, path: str, headers: Mapping[str, str] | None = None) -> Iterator[httpx.Response]:
        host = self._host
        try:
            with self._http.stream("GET", self._access.endpoint + path, headers=headers) as response:
                host = response.url.host
                self._check(response)
                yield response
        except httpx.TransportError as error:
            reason = str(error) or type(error).__name__
            raise Transient(
                f"no answer from {host} ({reason}); check the network, the proxy and {ENV_HUB_ENDPOINT}"
            ) from error
        except httpx.TooManyRedirects as error:
            raise FetchError(f"{host} redirects in a circle") from error

    def _check(self, response: httpx.Response) -> None:
        status, host = response.status_code, response.url.host
        if status in (200, 206):
            return
        if status in _BUSY:
            wait = retry_after_seconds(response.headers.get("Retry-After"))
            raise Transient(f"{host} answered {status} {response.reason_phrase}", wait_seconds=wait)
        raise FetchError(self._refusal(status, host, response.headers.get("X-Error-Code", "")))

    def _refusal(self, status: int, host: str, code: str) -> str:
        model, revision = self._reference.model_id, self._reference.revision
        if status in (401, 403):
            remedy = (
                f"the token in {ENV_HUB_TOKEN} has no access to it: accept the model's terms on {host}, or use another"
                if self._access.token
                else f"if it is gated or private, set {ENV_HUB_TOKEN} (in an InferenceService: model.credentialsSecretRef)"
            )
            return f"{host} refuses {model} ({status}): check its name; {remedy}"
        if status == 404 and code == "EntryNotFound":
            return f"{host} lists a file of {model} that it does not have (404)"
        if status == 404 and code == "RevisionNotFound":
            return f"{model} has no revision {revision!r} on {host} (404): correct the revision"
        if status == 404:
            return f"{host} has no model {model} with revision {revision!r} (404): correct the name or the revision"
        return f"{host} answered {status} to a request for {model}"


def _range_start(response: httpx.Response) -> int:
    """The first byte's offset from ``Content-Range: bytes 100-199/200``."""
    value = response.headers.get("Content-Range", "")
    start = value.removeprefix("bytes ").partition("-")[0]
    if not start.isdigit():
        raise Transient(f"{response.url.host} sent a part of a file without saying which ({value!r})")
    return int(start)
