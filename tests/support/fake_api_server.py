"""A Kubernetes API server for tests of the router: lists and watches two kinds, and takes PATCHes of the subresource scale."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from fake_pod import FakePod, PodRequest, chunk, json_response

from skiff_router.kubernetes_watch import ClusterAccess

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
Object = dict[str, Any]


@dataclass
class FakeApiServer:
    """``refusal`` is the status of PATCHes, 0 to take them; ``scaled`` lists the numbers that were written."""

    refusal: int = 0
    scaled: list[int] = field(default_factory=list)
    _objects: dict[str, dict[str, Object]] = field(
        default_factory=lambda: {"inferenceservices": {}, "endpointslices": {}}
    )
    _version: int = 10
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _log: list[tuple[int, str, Object]] = field(default_factory=list)

    def put_service(self, name: str, **fields: Any) -> None:
        """Create or replace an InferenceService; ``fields`` are its spec, and ``status``."""
        status = fields.pop("status", None)
        spec = {"model": {"uri": "demo://"}, "replicas": 1, **fields}
        self._put("inferenceservices", name, {"spec": spec, "status": status})

    def put_pods(self, service: str, *pods: FakePod, ready: bool = True) -> None:
        """Create or replace the EndpointSlice of a service; each pod has a port of its own, and so a slice."""
        for number, pod in enumerate(pods):
            self._put(
                "endpointslices",
                f"{service}-{number}",
                {
                    "endpoints": [{"addresses": [pod.address.host], "conditions": {"ready": ready}}],
                    "ports": [{"name": "http", "port": pod.address.port}],
                },
                {"kubernetes.io/service-name": service},
            )

    def remove_pods(self, service: str) -> None:
        """Remove the pods of a service."""
        for name in [name for name in self._objects["endpointslices"] if name.startswith(f"{service}-")]:
            body: Object = {"endpoints": [], "ports": []}
            self._put("endpointslices", name, body, {"kubernetes.io/service-name": service})

    def get(self, name: str) -> Object:
        """Return an InferenceService."""
        return self._objects["inferenceservices"][name]

    def _put(self, plural: str, name: str, body: Object, labels: dict[str, str] | None = None) -> None:
        self._version += 1
        meta = {"name": name, "namespace": "shop", "resourceVersion": str(self._version), "labels": labels}
        self._objects[plural][name] = obj = {"metadata": meta, **body}
        self._log.append((self._version, plural, obj))
        self._changed.set()
        self._changed = asyncio.Event()

    async def answer(self, request: PodRequest, writer: asyncio.StreamWriter) -> None:
        """Answer one request."""
        path, _, query = request.target.partition("?")
        if request.method == "PATCH":
            writer.write(self._scale(path, json.loads(request.body)))
            return
        plural = path.rsplit("/", 1)[1]
        if "watch=1" not in query:
            items = list(self._objects[plural].values())
            body = {"metadata": {"resourceVersion": str(self._version)}, "items": items}
            writer.write(json_response(json.dumps(body).encode()))
            return
        writer.write(HEAD)
        sent = int(dict(pair.split("=") for pair in query.split("&"))["resourceVersion"])
        while not writer.transport.is_closing():
            changed = self._changed
            for version, kind, obj in self._log:
                if version > sent and kind == plural:
                    line = json.dumps({"type": "MODIFIED", "object": obj}).encode() + b"\n"
                    writer.write(chunk(line))
            sent = self._version
            await writer.drain()
            await changed.wait()

    def _scale(self, path: str, patch: Object) -> bytes:
        *_, name, subresource = path.split("/")
        assert subresource == "scale"
        service = self.get(name)
        if self.refusal:
            return json_response(b'{"message": "not allowed"}', f"{self.refusal} Refused")
        if patch["metadata"]["resourceVersion"] != service["metadata"]["resourceVersion"]:
            return json_response(b'{"message": "the object has been modified"}', "409 Conflict")
        self.scaled.append(patch["spec"]["replicas"])
        spec = {**service["spec"], "replicas": patch["spec"]["replicas"]}
        self._put("inferenceservices", name, {"spec": spec, "status": service["status"]})
        return json_response(b"{}")


@contextlib.asynccontextmanager
async def api_server() -> AsyncIterator[tuple[FakeApiServer, ClusterAccess]]:
    """Run an API server, and yield it with the access to it."""
    api = FakeApiServer()
    listener = FakePod(api.answer)
    await listener.start()
    try:
        yield api, ClusterAccess(listener.address, None, None)
    finally:
        await listener.stop()
