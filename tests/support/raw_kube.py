"""kubectl as a client of whole JSON objects: with managedFields, which `kubectl get -o json` leaves out."""

import json
from typing import Any

from apiserver import COLLECTIONS
from kube import Kube, KubectlError


class RawKube:
    """A namespace as `strangers.Cluster` wants it."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self.namespace = kube.namespace

    def find(self, plural: str, name: str) -> Any:
        """Return one object as the API server sends it, or None."""
        try:
            return json.loads(self._kube.run("get", "--raw", self._path(plural, name)))
        except KubectlError as error:
            if "(NotFound)" not in str(error):
                raise
            return None

    def create(self, plural: str, body: Any) -> Any:
        """Create an object and return it."""
        return json.loads(
            self._kube.run("create", "--raw", self._path(plural), "-f", "-", text=json.dumps(body))
        )

    def merge(self, plural: str, name: str, patch: Any) -> Any:
        """Apply a JSON merge patch."""
        words = ("patch", plural, name, "--type=merge", "-o", "json", "-p", json.dumps(patch))
        return json.loads(self._kube.run(*words))

    def delete(self, plural: str, name: str) -> Any:
        """Delete one object."""
        return json.loads(self._kube.run("delete", "--raw", self._path(plural, name)))

    def _path(self, plural: str, name: str = "") -> str:
        return "/".join(part for part in (COLLECTIONS[plural].format(namespace=self.namespace), name) if part)
