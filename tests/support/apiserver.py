"""A small synchronous client of a test API server: plain dicts, from a kubeconfig file, no retries."""

import base64
import json
import ssl
import tempfile
from pathlib import Path
from typing import Any

import httpx
import yaml

COLLECTIONS = {
    "inferenceservices": "/apis/serving.skiff.dev/v1alpha1/namespaces/{namespace}/inferenceservices",
    "controllerrevisions": "/apis/apps/v1/namespaces/{namespace}/controllerrevisions",
    "deployments": "/apis/apps/v1/namespaces/{namespace}/deployments",
    "services": "/api/v1/namespaces/{namespace}/services",
    "serviceaccounts": "/api/v1/namespaces/{namespace}/serviceaccounts",
    "persistentvolumeclaims": "/api/v1/namespaces/{namespace}/persistentvolumeclaims",
    "poddisruptionbudgets": "/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets",
    "networkpolicies": "/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies",
    "pods": "/api/v1/namespaces/{namespace}/pods",
    "events": "/apis/events.k8s.io/v1/namespaces/{namespace}/events",
    "resourcequotas": "/api/v1/namespaces/{namespace}/resourcequotas",
    "persistentvolumes": "/api/v1/persistentvolumes",
    "nodes": "/api/v1/nodes",
    "configmaps": "/api/v1/namespaces/{namespace}/configmaps",
    "loraadapters": "/apis/serving.skiff.dev/v1alpha1/namespaces/{namespace}/loraadapters",
    "secrets": "/api/v1/namespaces/{namespace}/secrets",
    "modelcaches": "/apis/serving.skiff.dev/v1alpha1/modelcaches",
    "leases": "/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases",
}
MERGE = "application/merge-patch+json"
APPLY = "application/apply-patch+yaml"


class Refused(Exception):
    """The API server's answer was no success; `message` is its own."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message


def credentials(kubeconfig: Path, *, with_user: bool = True) -> tuple[str, ssl.SSLContext]:
    """The server's URL and a TLS context, with the user's certificate unless `with_user` is False."""
    content = yaml.safe_load(kubeconfig.read_text())
    cluster, user = content["clusters"][0]["cluster"], content["users"][0]["user"]
    authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
    context = ssl.create_default_context(cadata=authority)
    if not with_user:
        return cluster["server"], context
    with tempfile.NamedTemporaryFile() as pair:
        pair.write(base64.b64decode(user["client-certificate-data"]))
        pair.write(b"\n" + base64.b64decode(user["client-key-data"]))
        pair.flush()
        context.load_cert_chain(pair.name)
    return cluster["server"], context


class ApiServer:
    """The API server as the administrator sees one namespace of it."""

    def __init__(self, kubeconfig: Path, namespace: str = "default") -> None:
        server, context = credentials(kubeconfig)
        self.namespace = namespace
        self._http = httpx.Client(base_url=server, verify=context, timeout=30, trust_env=False)

    def in_namespace(self, namespace: str) -> "ApiServer":
        """The same connection, looking at another namespace."""
        other = object.__new__(ApiServer)
        other.namespace, other._http = namespace, self._http
        return other

    def path(self, plural: str, name: str = "", subresource: str = "") -> str:
        """URL path of a collection, an object or a subresource in this namespace."""
        parts = [COLLECTIONS[plural].format(namespace=self.namespace), name, subresource]
        return "/".join(part for part in parts if part)

    def request(self, method: str, path: str, body: Any = None, *, kind: str = "application/json") -> Any:
        """One request; raises `Refused` when the answer is no success."""
        content = None if body is None else json.dumps(body)
        reply = self._http.request(method, path, content=content, headers={"Content-Type": kind})
        if reply.status_code >= 400:
            # The reply for a path that is not served is plain text.
            is_json = reply.headers.get("Content-Type", "").startswith("application/json")
            raise Refused(
                reply.status_code, reply.json().get("message", reply.text) if is_json else reply.text
            )
        return reply.json()

    def get(self, plural: str, name: str, subresource: str = "") -> Any:
        """One object."""
        return self.request("GET", self.path(plural, name, subresource))

    def find(self, plural: str, name: str) -> Any:
        """One object, or None."""
        try:
            return self.get(plural, name)
        except Refused as error:
            if error.status != 404:
                raise
            return None

    def is_served(self, path: str) -> bool:
        """Whether objects can be listed at a path, which begins shortly after their definition is established."""
        try:
            self.request("GET", path)
        except Refused:
            return False
        return True

    def watched(self, plural: str, since: str) -> list[Any]:
        """Every watch event of the collection after a resource version, in order, up to a second from now."""
        query = f"watch=true&resourceVersion={since}&timeoutSeconds=1"
        reply = self._http.get(f"{self.path(plural)}?{query}")
        return [json.loads(line) for line in reply.text.splitlines()]

    def list(self, plural: str, selector: str = "") -> list[Any]:
        """All objects of the namespace, by label selector."""
        items: list[Any] = self.request("GET", f"{self.path(plural)}?labelSelector={selector}")["items"]
        return items

    def table(self, plural: str) -> Any:
        """The collection as `kubectl get` asks for it."""
        accept = "application/json;as=Table;v=v1;g=meta.k8s.io"
        return self._http.get(self.path(plural), headers={"Accept": accept}).json()

    def create(self, plural: str, body: Any) -> Any:
        """Create, strictly: unknown fields are refused."""
        return self.request("POST", f"{self.path(plural)}?fieldValidation=Strict", body)

    def merge(self, plural: str, name: str, patch: Any, subresource: str = "") -> Any:
        """JSON merge patch."""
        return self.request("PATCH", self.path(plural, name, subresource), patch, kind=MERGE)

    def delete(self, plural: str, name: str) -> Any:
        """Delete one object."""
        return self.request("DELETE", self.path(plural, name))

    def create_namespace(self) -> None:
        """Make this namespace."""
        self.request("POST", "/api/v1/namespaces", {"metadata": {"name": self.namespace}})

    def install(self, manifest: Path) -> None:
        """Server-side apply of CRDs."""
        for body in yaml.safe_load_all(manifest.read_text()):
            name = body["metadata"]["name"]
            path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}"
            self.request("PATCH", f"{path}?fieldManager=tests&force=true", body, kind=APPLY)
