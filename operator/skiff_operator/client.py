"""The API server over HTTP: plain dicts, short timeouts, and the credentials of the kubernetes package.

Loading and renewing credentials and the TLS settings are the package's. Its requests are not used: the generated models
cost ten times as much CPU as the JSON itself, and its REST client encodes with the slower `json`. Errors are translated
to those of `errors`.
"""

import json
import re
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final, Literal
from urllib.parse import urlencode

import aiohttp
import msgspec
from kubernetes.aio import config
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.client.rest import RESTClientObject

from skiff_operator import metrics
from skiff_operator.errors import (
    ApiAlreadyExists,
    ApiBusy,
    ApiConflict,
    ApiFailed,
    ApiNotFound,
    ApiRefused,
    ApiUnavailable,
    OperatorError,
)
from skiff_operator.kinds import CONTROLLER_REVISION, Kind
from skiff_operator.resources.metadata import FIELD_MANAGER

Body = dict[str, Any] | list[dict[str, Any]] | str
"""An object, the operations of a JSON patch, or text in the format of the content type."""

Propagation = Literal["Background", "Foreground"]

PAGE: Final = 100
"""Objects of one list request."""

# No total: time spent waiting for a free connection must not count against the server.
_TIMEOUT: Final = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=30)
_APPLY: Final = "application/apply-patch+yaml; charset=utf-8"
"""With a parameter, for which the kubernetes package sends text as it is."""
_JSON: Final = "application/json"
_ESCAPED_BY_GO: Final = re.compile("[&<>\u2028\u2029]")
_ESCAPED_IN_YAML: Final = re.compile("[\x7f-\uffff]")
MERGE_PATCH: Final = "application/merge-patch+json"
JSON_PATCH: Final = "application/json-patch+json"
_BUSY: Final = (429, 500, 502, 503, 504)
_MALFORMED: Final = "failed to create typed patch object"
"""A server-side apply with a field of the wrong type or name is answered by 500 and these words."""


async def configure() -> Configuration:
    """Load the credentials of the pod's service account, or of the kubeconfig file outside of a pod.

    Raises:
        OperatorError: neither exists.
    """
    settings = Configuration()
    try:
        config.load_incluster_config(client_configuration=settings)
    except config.ConfigException:
        try:
            await config.load_kube_config(client_configuration=settings)
        except (config.ConfigException, FileNotFoundError) as error:
            raise OperatorError(f"no cluster: not in a pod, and the kubeconfig gave: {error}") from error
    return settings


class Client:
    """A client with one pool of connections to one API server."""

    def __init__(self, configuration: Configuration, *, connections: int) -> None:
        """Open at most `connections` at a time."""
        self._configuration = configuration
        self._connections = connections
        self._session: aiohttp.ClientSession | None = None
        self._options: dict[str, Any] = {
            option: value
            for option, value in (
                ("proxy", configuration.proxy),
                ("proxy_headers", configuration.proxy_headers),
                ("server_hostname", configuration.tls_server_name),
            )
            if value
        }

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    async def list(
        self, kind: Kind, namespace: str | None, *, selector: str, fields: str = ""
    ) -> AsyncIterator[dict[str, Any]]:
        """List all objects of a kind, in one namespace or all, page by page; kind and apiVersion are filled in."""
        query = {"limit": str(PAGE), "labelSelector": selector}
        if fields:
            query["fieldSelector"] = fields
        while True:
            page = await self.request("GET", kind.path(namespace), query=query)
            for item in page["items"]:
                yield {"apiVersion": kind.api_version, "kind": kind.name, **item}
            token = page["metadata"].get("continue")
            if not token:
                return
            query["continue"] = token

    async def get(self, kind: Kind, namespace: str, name: str) -> dict[str, Any]:
        """Read one object. Raises `ApiNotFound`."""
        return await self.request("GET", kind.path(namespace, name))

    async def apply(
        self,
        kind: Kind,
        namespace: str | None,
        name: str,
        body: dict[str, Any],
        *,
        subresource: str = "",
    ) -> dict[str, Any]:
        """Server-side apply as this operator's field manager, with force; return the object as stored.

        It creates a missing object and takes over an existing one, unless `metadata` of the body has a uid and a
        resourceVersion: then any other object raises `ApiConflict`.
        """
        query = {"fieldManager": FIELD_MANAGER, "force": "true"}
        path = kind.path(namespace, name, subresource)
        return await self.request("PATCH", path, _yaml(body), query=query, content_type=_APPLY)

    async def create(self, kind: Kind, namespace: str | None, body: dict[str, Any]) -> dict[str, Any]:
        """Create an object and return it as stored. Unknown fields are refused, as by an apply.

        Raises:
            ApiAlreadyExists: another object has the name.
        """
        query = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict"}
        if kind != CONTROLLER_REVISION:
            return await self.request("POST", kind.path(namespace), body, query=query)
        # The API server keeps `data` as the bytes that it got, and refuses any other bytes later, even after a patch
        # of something else, for which it writes the object in its own form. So it gets that form at once.
        text = _go_json(body)
        return await self.request("POST", kind.path(namespace), text, query=query)

    async def edit(
        self, kind: Kind, namespace: str, name: str, values: dict[str, Any], *, version: str
    ) -> dict[str, Any]:
        """Replace values at JSON pointers by a JSON patch. Raises `ApiConflict` for another version of the object."""
        replacements = {"/metadata/resourceVersion": version, **values}
        operations = [{"op": "replace", "path": path, "value": value} for path, value in replacements.items()]
        path, query = kind.path(namespace, name), {"fieldManager": FIELD_MANAGER}
        return await self.request("PATCH", path, operations, query=query, content_type=JSON_PATCH)

    async def replace(self, kind: Kind, namespace: str, name: str, body: dict[str, Any]) -> dict[str, Any]:
        """Replace an object at the version it was read. Raises `ApiConflict` when that version is stale."""
        return await self.request("PUT", kind.path(namespace, name), body)

    async def delete(
        self,
        kind: Kind,
        namespace: str | None,
        name: str,
        *,
        uid: str,
        version: str,
        propagation: Propagation = "Background",
    ) -> None:
        """Delete exactly this version of an object, and its dependents after it, or before it in the foreground.

        Raises:
            ApiNotFound: no object has the name.
            ApiConflict: the object has another uid or version.
        """
        preconditions = {"uid": uid, "resourceVersion": version}
        body = {"preconditions": preconditions, "propagationPolicy": propagation}
        await self.request("DELETE", kind.path(namespace, name), body)

    async def request(
        self,
        method: str,
        path: str,
        body: Body | None = None,
        *,
        query: dict[str, str] | None = None,
        content_type: str = _JSON,
    ) -> dict[str, Any]:
        """Send one request and return the decoded response. Raises like `send`."""
        data = await self.send(method, path, body, query=query, content_type=content_type)
        answer: dict[str, Any] = msgspec.json.decode(data)
        return answer

    async def send(
        self,
        method: str,
        path: str,
        body: Body | None = None,
        *,
        query: dict[str, str] | None = None,
        content_type: str = _JSON,
    ) -> bytes:
        """Send one request and return the response's body.

        Raises:
            ApiUnavailable: no response; `ApiBusy`: the server asks to retry later.
            ApiConflict: the object has changed meanwhile.
            ApiRefused: any other unsuccessful response.
        """
        configuration = self._configuration
        url = f"{configuration.host}{path}" + (f"?{urlencode(query)}" if query else "")
        headers = {"Content-Type": content_type}
        content = (
            body.encode() if isinstance(body, str) else None if body is None else msgspec.json.encode(body)
        )
        try:
            token = await configuration.get_api_key_with_prefix("BearerToken")
            if token:
                headers["Authorization"] = token
            async with self._pool().request(
                method, url, data=content, headers=headers, **self._options
            ) as response:
                data = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            metrics.api_requests.labels(method, "none").inc()
            raise ApiUnavailable(f"{method} {path}: {error!r}") from error
        metrics.api_requests.labels(method, str(response.status)).inc()
        if response.status >= 400:
            raise _error(response.status, f"{method} {path}", data, retry_after_seconds(response.headers))
        return bytes(data)

    def _pool(self) -> aiohttp.ClientSession:
        """Return the session, made on first use because it belongs to the running event loop."""
        if self._session is None:
            context = RESTClientObject(self._configuration).ssl_context
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._connections, ssl=context),
                timeout=_TIMEOUT,
                # By default each request looks up netrc and proxies in a thread; the configuration holds them already.
                trust_env=False,
                headers={"Accept": _JSON, "User-Agent": f"{FIELD_MANAGER}/skiff"},
            )
        return self._session


def _yaml(body: dict[str, Any]) -> str:
    """Encode an object as YAML: as JSON in which only characters that YAML reads alike stay unescaped.

    A pair of escaped surrogates is one character in JSON and none in YAML, so characters beyond U+FFFF stay.
    """
    text = json.dumps(body, ensure_ascii=False)
    return _ESCAPED_IN_YAML.sub(_escape, text)


def _go_json(body: dict[str, Any]) -> str:
    """Encode an object as Go's encoder does: with sorted keys, and with the characters of HTML escaped."""
    text = msgspec.json.encode(body, order="sorted").decode()
    return _ESCAPED_BY_GO.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    """Return the one character of a match as an escape of JSON."""
    return f"\\u{ord(match.group()):04x}"


def retry_after_seconds(headers: Mapping[str, str]) -> float:
    """Return the seconds of a Retry-After header; 0 when it is absent or names a date."""
    text = headers.get("Retry-After", "")
    return float(text) if text.isdecimal() else 0.0


def _error(status: int, request: str, data: bytes, retry_after: float) -> OperatorError:
    """Map a response to an error by its code and the reason of its Status: a 409 covers conflicts of several kinds."""
    try:
        answer: dict[str, Any] = msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.DecodeError:
        answer = {}
    text = str(answer.get("message", data[:300].decode(errors="replace")))
    if status in _BUSY and _MALFORMED not in text:
        error = ApiFailed if status == 500 else ApiBusy
        return error(f"{request}: {status}: {text}", retry_after_seconds=retry_after)
    reason = answer.get("reason")
    if status == 409 and reason == "Conflict":
        return ApiConflict(text)
    if status == 409 and reason == "AlreadyExists":
        return ApiAlreadyExists(text, status=status)
    return (ApiNotFound if status == 404 else ApiRefused)(text, status=status)
