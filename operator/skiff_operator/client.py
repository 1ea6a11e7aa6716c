"""The API server over HTTP: the kubernetes package's asyncio client, with plain dicts and short timeouts.

Connections, TLS and credentials are the package's; its generated models are not used, because they cost ten times
as much CPU as the JSON itself. Errors are translated to those of `errors`.
"""

from collections.abc import AsyncIterator
from typing import Any, Final
from urllib.parse import urlencode

import aiohttp
import msgspec
from kubernetes.aio import config
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration

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
from skiff_operator.kinds import Kind
from skiff_operator.resources.metadata import FIELD_MANAGER

Body = dict[str, Any] | list[dict[str, Any]]
"""An object, or the operations of a JSON patch."""

PAGE: Final = 100
"""Objects of one list request."""

# No total: time spent waiting for a free connection must not count against the server.
_TIMEOUT: Final = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=30)
_APPLY: Final = "application/apply-patch+yaml"
_JSON: Final = "application/json"
_JSON_PATCH: Final = "application/json-patch+json"
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
        configuration.connection_pool_maxsize = connections
        # By default each request looks up netrc and proxies in a thread; `configuration` holds them already.
        configuration.client_session_kwargs = {"trust_env": False}
        self._api = ApiClient(configuration)
        self._agent = f"{FIELD_MANAGER}/skiff"

    async def close(self) -> None:
        """Close all connections."""
        await self._api.close()

    async def list(
        self, kind: Kind, namespace: str | None, *, selector: str
    ) -> AsyncIterator[dict[str, Any]]:
        """List all objects of a kind, in one namespace or all, page by page; kind and apiVersion are filled in."""
        query = {"limit": str(PAGE), "labelSelector": selector}
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
        return await self.request("PATCH", path, body, query=query, content_type=_APPLY)

    async def create(self, kind: Kind, namespace: str | None, body: dict[str, Any]) -> dict[str, Any]:
        """Create an object and return it as stored. Unknown fields are refused, as by an apply.

        Raises:
            ApiAlreadyExists: another object has the name.
        """
        query = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict"}
        return await self.request("POST", kind.path(namespace), body, query=query)

    async def edit(
        self, kind: Kind, namespace: str, name: str, values: dict[str, Any], *, version: str
    ) -> dict[str, Any]:
        """Replace values at JSON pointers by a JSON patch. Raises `ApiConflict` for another version of the object."""
        replacements = {"/metadata/resourceVersion": version, **values}
        operations = [{"op": "replace", "path": path, "value": value} for path, value in replacements.items()]
        path, query = kind.path(namespace, name), {"fieldManager": FIELD_MANAGER}
        return await self.request("PATCH", path, operations, query=query, content_type=_JSON_PATCH)

    async def replace(self, kind: Kind, namespace: str, name: str, body: dict[str, Any]) -> dict[str, Any]:
        """Replace an object at the version it was read. Raises `ApiConflict` when that version is stale."""
        return await self.request("PUT", kind.path(namespace, name), body)

    async def delete(self, kind: Kind, namespace: str, name: str, *, uid: str, version: str) -> None:
        """Delete exactly this version of an object, and its dependents in the background.

        Raises:
            ApiNotFound: no object has the name.
            ApiConflict: the object has another uid or version.
        """
        preconditions = {"uid": uid, "resourceVersion": version}
        body = {"preconditions": preconditions, "propagationPolicy": "Background"}
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
        """Send one request and return the decoded response.

        Raises:
            ApiUnavailable: no response; `ApiBusy`: the server asks to retry later.
            ApiConflict: the object has changed meanwhile.
            ApiRefused: any other unsuccessful response.
        """
        configuration = self._api.configuration
        url = f"{configuration.host}{path}" + (f"?{urlencode(query)}" if query else "")
        headers = {"Content-Type": content_type, "Accept": _JSON, "User-Agent": self._agent}
        try:
            token = await configuration.get_api_key_with_prefix("BearerToken")
            if token:
                headers["Authorization"] = token
            response = await self._api.rest_client.request(
                method, url, headers=headers, body=body, _request_timeout=_TIMEOUT
            )
            data = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            metrics.api_requests.labels(method, "none").inc()
            raise ApiUnavailable(f"{method} {path}: {error!r}") from error
        metrics.api_requests.labels(method, str(response.status)).inc()
        if response.status >= 400:
            raise _error(response.status, f"{method} {path}", data)
        answer: dict[str, Any] = msgspec.json.decode(data)
        return answer


def _error(status: int, request: str, data: bytes) -> OperatorError:
    """Map a response to an error by its code and the reason of its Status: a 409 covers conflicts of several kinds."""
    try:
        answer: dict[str, Any] = msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.DecodeError:
        answer = {}
    text = str(answer.get("message", data[:300].decode(errors="replace")))
    if status in _BUSY and _MALFORMED not in text:
        return (ApiFailed if status == 500 else ApiBusy)(f"{request}: {status}: {text}")
    reason = answer.get("reason")
    if status == 409 and reason == "Conflict":
        return ApiConflict(text)
    if status == 409 and reason == "AlreadyExists":
        return ApiAlreadyExists(text, status=status)
    return (ApiNotFound if status == 404 else ApiRefused)(text, status=status)
