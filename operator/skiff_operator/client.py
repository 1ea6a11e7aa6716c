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
from skiff_operator.errors import ApiConflict, ApiNotFound, ApiRefused, ApiUnavailable, OperatorError
from skiff_operator.kinds import Kind
from skiff_operator.resources.metadata import FIELD_MANAGER

PAGE: Final = 100
"""Objects of one list request."""

# No total: time spent waiting for a free connection must not count against the server.
_TIMEOUT: Final = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=30)
_APPLY: Final = "application/apply-patch+yaml"
_JSON: Final = "application/json"
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
        force: bool,
        subresource: str = "",
    ) -> dict[str, Any]:
        """Server-side apply under this operator's name; the answer is the object as it is now.

        `force` takes fields back from others; without it their owner is named in an `ApiConflict`.
        """
        query = {"fieldManager": FIELD_MANAGER, "force": "true" if force else "false"}
        path = kind.path(namespace, name, subresource)
        return await self.request("PATCH", path, body, query=query, content_type=_APPLY)

    async def create(self, kind: Kind, namespace: str, body: dict[str, Any]) -> dict[str, Any]:
        """Create an object that is written once. Raises `ApiConflict` when the name is taken."""
        return await self.request("POST", kind.path(namespace), body)

    async def replace(self, kind: Kind, namespace: str, name: str, body: dict[str, Any]) -> dict[str, Any]:
        """Write a whole object over the version it was read at. Raises `ApiConflict` when that is old."""
        return await self.request("PUT", kind.path(namespace, name), body)

    async def delete(self, kind: Kind, namespace: str, name: str, *, uid: str) -> None:
        """Delete exactly this object, and what it owns in the background; gone already is as good."""
        body = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        try:
            await self.request("DELETE", kind.path(namespace, name), body)
        except (ApiNotFound, ApiConflict):
            return

    async def request(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        query: dict[str, str] | None = None,
        content_type: str = _JSON,
    ) -> dict[str, Any]:
        """One request and its decoded answer.

        Raises:
            ApiUnavailable: no answer, or one that says to try later.
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
    try:
        text = msgspec.json.decode(data)["message"]
    except (msgspec.DecodeError, KeyError, TypeError):
        text = data[:300].decode(errors="replace")
    if status in _BUSY and _MALFORMED not in str(text):
        return ApiUnavailable(f"{request}: {status}: {text}")
    kind = {404: ApiNotFound, 409: ApiConflict}.get(status, ApiRefused)
    return kind(str(text), status=status)
