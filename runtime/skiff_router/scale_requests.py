"""Asks for pods: writes the number of pods of an InferenceService by its subresource ``scale``.

That subresource reaches the number alone, so the router needs no right to change anything else of an InferenceService. Each
request names the version that the router has seen: a number that was raised meanwhile is not lowered.
"""

from typing import Final

import msgspec

from skiff_router.endpoints import Backend
from skiff_router.kubernetes_watch import ApiError, ClusterAccess
from skiff_router.scaling import Scaling
from skiff_router.upstream import ConnectionPool, bearer_line
from skiff_router.whole_response import fetch
from skiff_runtime import contract

CONFLICT: Final = 409
_SECONDS: Final = 10.0
_MAX_BYTES: Final = 1 << 20


class ScaleRequester:
    """Writes numbers of pods through one API server."""

    def __init__(self, access: ClusterAccess) -> None:
        self._access = access
        self._pool = ConnectionPool(access.address, access.tls)

    async def request(self, backend: Backend, seen: Scaling, replicas: int) -> None:
        """Ask for ``replicas`` pods of the InferenceService that ``backend`` stands for, at the version that was ``seen``.

        Raises:
            ApiError: It was refused; with the status ``CONFLICT``, the InferenceService has changed.
            UpstreamError: The API server does not answer. TimeoutError: not in time. OSError: the token cannot be read.
        """
        namespace, _, name = backend.key.partition("/")
        path = f"/apis/{contract.API_GROUP}/{contract.API_VERSION}/namespaces/{namespace}/inferenceservices/{name}/scale"
        body = msgspec.json.encode(
            {
                "metadata": {"resourceVersion": seen.resource_version},
                "spec": {"replicas": replicas},
            }
        )
        head = (
            f"PATCH {path}?fieldManager=skiff-router HTTP/1.1\r\nhost: {self._access.address}\r\n"
            f"content-type: application/merge-patch+json\r\ncontent-length: {len(body)}\r\n"
            f"accept: application/json\r\n{bearer_line(self._access.token())}\r\n"
        )
        status, answer = await fetch(self._pool, head.encode() + body, seconds=_SECONDS, limit=_MAX_BYTES)
        if status >= 300:
            raise ApiError(status, answer[:500].decode(errors="replace"))

    def close(self) -> None:
        """Close the connections."""
        self._pool.close()
