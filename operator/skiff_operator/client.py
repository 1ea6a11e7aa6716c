"""The API server over HTTP: the kubernetes package's asyncio client, with plain dicts and short timeouts.

Connections, TLS and credentials are the package's; its generated models are left out, for they cost ten times
the work of the JSON itself. Errors leave here as this project's own.
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
    """Credentials of the pod's service account, or those of the kubeconfig file when there is no pod.

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
    """One pool of connections to one API server."""

    def __init__(self, configuration: Configuration, *, connections: int) -> None:
        """Open at most `connections` at a time."""
        configuration.connection_pool_maxsize = connections
        # By default each request looks for a netrc file and for proxies in a thread; `configuration` knows already.
        configuration.client_session_kwargs = {"trust_env": False}
        self._api = ApiClient(configuration)
        self._agent = f"{FIELD_MANAGER}/skiff"

    async def close(self) -> None:
        """Close all connections."""
        await self._api.close()

    async def list(
        self, kind: Kind, namespace: str | None, *, selector: str
    ) -> AsyncIterator[dict[str, Any]]:
        """All objects of a kind, in one namespace or all, page by page, each with the type that lists leave out."""
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
        """One object. Raises `ApiNotFound`."""
        return await self.request("GET", kind.path(namespace, name))

    async def apply(
        self,
        kind: Kind,
        namespace: str,
        name: str,
        body: dict[str, Any],
        *,
        subresource: str = "",
    ) -> dict[str, Any]:
        """Server-side apply under this operator's name, by force; the answer is the object as it is now.

        It creates what does not exist and takes over what does, unless `metadata` of the body has the uid and the
        resourceVersion of the object that is meant: then any other raises `ApiConflict`.
        """
        query = {"fieldManager": FIELD_MANAGER, "force": "true"}
        path = kind.path(namespace, name, subresource)
        return await self.request("PATCH", path, body, query=query, content_type=_APPLY)

    async def create(self, kind: Kind, namespace: str, body: dict[str, Any]) -> dict[str, Any]:
        """Create an object; the answer is the object as it is now. An unknown field is refused, as by an apply.

        Raises:
            ApiAlreadyExists: another object has the name.
        """
        query = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict"}
        return await self.request("POST", kind.path(namespace), body, query=query)

    async def edit(
        self, kind: Kind, namespace: str, name: str, values: dict[str, Any], *, version: str
    ) -> dict[str, Any]:
        """Replace the values at JSON pointers. Raises `ApiConflict` unless the object is of this version."""
        places = {"/metadata/resourceVersion": version, **values}
        operations = [{"op": "replace", "path": path, "value": value} for path, value in places.items()]
        path, query = kind.path(namespace, name), {"fieldManager": FIELD_MANAGER}
        return await self.request("PATCH", path, operations, query=query, content_type=_JSON_PATCH)

    async def replace(self, kind: Kind, namespace: str, name: str, body: dict[str, Any]) -> dict[str, Any]:
        """Write a whole object over the version it was read at. Raises `ApiConflict` when that is old."""
        return await self.request("PUT", kind.path(namespace, name), body)

    async def delete(self, kind: Kind, namespace: str, name: str, *, uid: str, version: str) -> None:
        """Delete exactly this version of an object, and what it owns in the background.

        Raises:
            ApiNotFound: nothing has the name.
            ApiConflict: the object is another one, or of another version.
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
        """One request and its decoded answer.

        Raises:
            ApiUnavailable: no answer; `ApiBusy` one that says to try later.
            ApiConflict: what the request is about has changed meanwhile.
            ApiRefused: any other answer that is not a success.
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
    """Choose the error by the code and by the Status object's reason, for a 409 stands for conflicts of many kinds."""
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
