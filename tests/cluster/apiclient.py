"""A small client of the Kubernetes API for bringing a cluster up: standard library only, one connection a call."""

from __future__ import annotations

import http.client
import json
import ssl
from dataclasses import dataclass
from typing import Any

from commands import ClusterError
from pki import Authority

TIMEOUT_SECONDS = 10


@dataclass(frozen=True)
class ApiClient:
    """Talks to the API server at `address`:`port` as the bearer of an issued certificate."""

    authority: Authority
    address: str
    port: int
    user: str = "admin"

    def request(
        self, method: str, path: str, body: object = None, content_type: str = "application/json"
    ) -> bytes:
        """Send one request and return the reply's body; raises OSError or ClusterError (status 400 and up)."""
        context = ssl.create_default_context(cafile=str(self.authority.certificate))
        context.load_cert_chain(self.authority.path(self.user, "crt"), self.authority.path(self.user, "key"))
        connection = http.client.HTTPSConnection(
            self.address, self.port, context=context, timeout=TIMEOUT_SECONDS
        )
        try:
            payload = None if body is None else json.dumps(body)
            connection.request(method, path, body=payload, headers={"Content-Type": content_type})
            reply = connection.getresponse()
            data = reply.read()
        finally:
            connection.close()
        if reply.status >= 400:
            raise ClusterError(f"{method} {path}: {reply.status} {data.decode(errors='replace')[:500]}")
        return data

    def get(self, path: str) -> Any:
        """Return an object or a list as plain dicts."""
        return json.loads(self.request("GET", path))

    def apply(self, path: str, manifest: dict[str, Any]) -> None:
        """Create or change an object by server-side apply; JSON is YAML, which is what that verb wants."""
        query = "?fieldManager=skiff-test-cluster&force=true"
        self.request("PATCH", path + query, manifest, "application/apply-patch+yaml")

    def answers(self, path: str) -> bool:
        """Say whether a GET of `path` succeeds now."""
        try:
            self.request("GET", path)
        except (OSError, http.client.HTTPException, ClusterError):
            return False
        return True
