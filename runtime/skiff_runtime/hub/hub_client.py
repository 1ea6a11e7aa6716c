"""Client of a hub for one model, on top of huggingface_hub: bounded retries, and errors that name the remedy."""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import urljoin, urlsplit

import httpx2
from huggingface_hub import (
    HfApi,
    constants,
    get_hf_file_metadata,
    get_session,
    get_token,
    hf_hub_download,
    hf_hub_url,
)
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

from skiff_runtime import log
from skiff_runtime.contract import ENV_HUB_ENDPOINT, ENV_HUB_TOKEN
from skiff_runtime.errors import FetchError
from skiff_runtime.hub.hub_ranges import TRANSIENT_STATUSES, HubRanges, Location
from skiff_runtime.hub.hub_reference import HubReference, is_commit
from skiff_runtime.hub.repository import MAX_FILES, POOLING_CONFIG, RemoteFile, RepositoryListing
from skiff_runtime.transfer.range_source import RangesUnsupported
from skiff_runtime.version import __version__

T = TypeVar("T")

ATTEMPTS: Final = 5
BASE_WAIT_SECONDS: Final = 1.0
"""Wait before the second attempt; it doubles with each further attempt."""
MAX_WAIT_SECONDS: Final = 310
"""The longest Retry-After to obey. The hub limits requests per five minutes, and asks clients to wait for the next window."""
_LISTING_TIMEOUT_SECONDS: Final = 20.0
_USER_AGENT: Final[dict[str, Any]] = {"library_name": "skiff", "library_version": __version__}


class HubUnavailable(FetchError):
    """The hub does not answer, or HF_HUB_OFFLINE is set. The cache may hold the model."""


class TransientHubError(HubUnavailable):
    """A failure that a retry may resolve."""


class HubClient:
    """Client of one hub for one model."""

    def __init__(self, reference: HubReference, endpoint: str | None = None) -> None:
        self._reference = reference
        self._endpoint = (endpoint or constants.ENDPOINT).rstrip("/")
        self._host = _host_of(self._endpoint)
        if not self._host:
            raise FetchError(
                f"{ENV_HUB_ENDPOINT} must be an http:// or https:// address, not {self._endpoint!r}"
            )
        self._token = get_token()
        # Checked here because the error of an HTTP library about a malformed header would quote the token.
        if self._token and not (
            self._token.isascii() and self._token.isprintable() and " " not in self._token
        ):
            raise FetchError(
                f"{ENV_HUB_TOKEN} contains characters that no token has (the token is not shown here)"
            )
        self.stop = threading.Event()

    def list_files(self) -> RepositoryListing:
        """Return the repository's files, as ``RepositoryListing`` has them, at the reference's revision. Raises ``FetchError``."""
        api = HfApi(endpoint=self._endpoint, **_USER_AGENT)
        options: dict[str, Any] = {"files_metadata": True, "timeout": _LISTING_TIMEOUT_SECONDS}
        name, revision = self._reference.model_id, self._reference.revision
        info = self._retry(str(self._reference), lambda: api.model_info(name, revision=revision, **options))
        siblings = info.siblings or []
        if not is_commit(info.sha or "") or len(siblings) > MAX_FILES:
            raise FetchError(
                f"the hub's listing of {self._reference} has no commit, or more than {MAX_FILES} files"
            )
        files = [
            RemoteFile(each.rfilename, each.lfs.size, each.lfs.sha256)
            if each.lfs
            else RemoteFile(each.rfilename, each.size or 0, each.blob_id or "")
            for each in siblings
            if "/" not in each.rfilename or POOLING_CONFIG.fullmatch(each.rfilename)
        ]
        return RepositoryListing(info.sha or "", sorted(files, key=lambda file: file.name))

    def download(self, commit: str, name: str, cache_dir: Path) -> Path:
        """Return the file's path in the cache, after downloading it if it is missing. Raises ``FetchError``."""
        options: dict[str, Any] = {"cache_dir": cache_dir, "endpoint": self._endpoint, **_USER_AGENT}
        model = self._reference.model_id
        return Path(self._retry(name, lambda: hf_hub_download(model, name, revision=commit, **options)))

    def find_ranges(self, commit: str, files: Sequence[RemoteFile]) -> HubRanges | None:
        """Return a source of the files' ranges; None if the hub offers Xet for the first. Raises ``FetchError``."""
        ranges = HubRanges(lambda name: self._locate(commit, name), self._headers())
        try:
            ranges.locate(files[0].name)
        except RangesUnsupported:
            return None
        return ranges

    def _locate(self, commit: str, name: str) -> Location | None:
        """Return the address of a file's content; None if it is to be received by Xet. Raises ``FetchError``."""
        url = hf_hub_url(self._reference.model_id, name, revision=commit, endpoint=self._endpoint)
        options: dict[str, Any] = {
            "timeout": _LISTING_TIMEOUT_SECONDS,
            "endpoint": self._endpoint,
            **_USER_AGENT,
        }
        metadata = self._retry(name, lambda: get_hf_file_metadata(url, **options))
        if metadata.xet_file_data is not None and _has_xet():
            return None
        location = urljoin(url, metadata.location)
        return Location(location, is_hub=urlsplit(location)[:2] == urlsplit(self._endpoint)[:2])

    def _headers(self) -> dict[str, str]:
        """Return the headers of requests to the hub itself, as the library sends them."""
        agent = {"User-Agent": f"skiff/{__version__}"}
        if not self._token or constants.HF_HUB_DISABLE_IMPLICIT_TOKEN:
            return agent
        return {**agent, "Authorization": f"Bearer {self._token}"}

    @contextmanager
    def bounded_retry_after(self) -> Iterator[None]:
        """Raise ``FetchError`` in the block for a Retry-After above ``MAX_WAIT_SECONDS``: the library would obey any."""
        _long_wait_hook.acquire()
        try:
            yield
        finally:
            _long_wait_hook.release()

    def _retry(self, what: str, action: Callable[[], T]) -> T:
        """Return the result of ``action``, retried on transient errors. Raises ``FetchError`` when it keeps failing."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return action()
            except FetchError:
                raise
            except Exception as error:
                translated = self._translate(error)
                if not isinstance(translated, TransientHubError):
                    raise translated from error
                if attempt == ATTEMPTS:
                    raise HubUnavailable(f"{what}: {translated}; gave up after {attempt} attempts") from error
                # Jitter spreads the retries of many pods.
                wait = BASE_WAIT_SECONDS * 2 ** (attempt - 1) * random.uniform(0.75, 1.25)
                log.warning("fetch_attempt_failed", what=what, reason=str(translated), wait_seconds=wait)
            if self.stop.wait(wait):
                break
        raise FetchError(f"{what}: stopped while waiting to try again")

    def _translate(self, error: Exception) -> Exception:
        """Return the ``FetchError`` that names the remedy, or ``error`` itself if the hub has no part in it."""
        if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
            error = error.__cause__
        match error:
            case OfflineModeIsEnabled():
                return HubUnavailable(
                    f"{self._reference} is not complete in the cache, and HF_HUB_OFFLINE forbids downloads: "
                    "unset it, or fetch the model beforehand"
                )
            case HfHubHTTPError():
                return self._translate_response(error.response)
            case httpx2.TooManyRedirects():
                return FetchError(f"{self._host} redirects in a loop")
            case httpx2.HTTPError():
                return TransientHubError(
                    f"no answer from {self._host} ({str(error) or type(error).__name__}); "
                    f"check the network, the proxy and {ENV_HUB_ENDPOINT}"
                )
            case OSError() if error.errno is None:  # a wrong length, or a header that no hub sends
                first_line = str(error).partition("\n")[0]
                return TransientHubError(f"{self._host} does not answer like a hub: {first_line}")
            case ValueError() | TypeError() | KeyError() | AttributeError():
                return FetchError(f"the hub's listing of {self._reference} is malformed: {error!r}")
            case _:
                return error

    def _translate_response(self, response: httpx2.Response) -> FetchError:
        status, host = response.status_code, response.request.url.host
        if status in TRANSIENT_STATUSES:
            return TransientHubError(f"{host} answered {status} {response.reason_phrase}")
        model, revision = self._reference.model_id, self._reference.revision
        if status in (401, 403):
            remedy = (
                f"the token in {ENV_HUB_TOKEN} has no access to it: accept the model's terms on {host}, or use another"
                if self._token
                else f"if it is gated or private, set {ENV_HUB_TOKEN} (in an InferenceService: model.credentialsSecretRef)"
            )
            return FetchError(f"{host} refuses {model} ({status}): check its name; {remedy}")
        code = response.headers.get("X-Error-Code", "")
        if status == 404 and code == "EntryNotFound":
            return FetchError(f"{host} lists a file of {model} that it does not serve (404)")
        if status == 404 and code == "RevisionNotFound":
            return FetchError(f"{model} has no revision {revision!r} on {host} (404): correct the revision")
        if status == 404:
            return FetchError(
                f"{host} has no model {model} with revision {revision!r} (404): correct the name or the revision"
            )
        return FetchError(f"{host} answered {status} to a request for {model}")


def _has_xet() -> bool:
    """Return whether huggingface_hub receives files by Xet where the hub offers it."""
    return not constants.HF_HUB_DISABLE_XET and find_spec("hf_xet") is not None


def _host_of(endpoint: str) -> str:
    """Return the host of an http(s) address, without user and password; "" if it is malformed."""
    try:
        parts = urlsplit(endpoint)
    except ValueError:
        return ""
    return parts.hostname or "" if parts.scheme in ("http", "https") else ""


class _LongWaitHook:
    """Counts downloads on the library's session, which all threads share, and keeps ``_reject_long_waits`` there meanwhile."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0

    def acquire(self) -> None:
        with self._lock:
            self._users += 1
            self._set(is_present=True)

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            self._set(is_present=self._users > 0)

    def _set(self, *, is_present: bool) -> None:
        session = get_session()
        hooks = session.event_hooks
        others = [each for each in hooks["response"] if each is not _reject_long_waits]
        session.event_hooks = {**hooks, "response": [*others, _reject_long_waits] if is_present else others}


_long_wait_hook: Final = _LongWaitHook()


def _reject_long_waits(response: httpx2.Response) -> None:
    retry_after = response.headers.get("Retry-After", "")
    if (
        response.status_code in TRANSIENT_STATUSES
        and retry_after.isdigit()
        and int(retry_after) > MAX_WAIT_SECONDS
    ):
        host, status = response.request.url.host, f"{response.status_code} {response.reason_phrase}"
        raise FetchError(f"{host} answered {status} and asks to retry after {retry_after} s")
