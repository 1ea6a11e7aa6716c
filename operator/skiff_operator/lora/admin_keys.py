"""The admin keys with which the operator changes the adapters of pods.

Each InferenceService has its own, derived from one root, which lies in a Secret in the operator's namespace; pods get the
digest alone. So the operator reads no Secret but this one, makes none in the namespaces of others, and a key that a pod has
seen is of use at the pods of the same InferenceService only.
"""

import base64
import binascii
import hashlib
import hmac
import secrets
from typing import Any, Final

from skiff_operator.client import Client
from skiff_operator.errors import ApiAlreadyExists, ApiNotFound, Retryable
from skiff_operator.kinds import SECRET
from skiff_operator.resources.metadata import FIELD_MANAGER
from skiff_operator.settings import Settings
from skiff_runtime import contract

_ROOT_BYTES: Final = 32
_FIELD: Final = "root"


class AdminKeys:
    """The keys of all InferenceServices. The root is read, or made, when the first one is needed."""

    def __init__(self, client: Client, settings: Settings) -> None:
        """Keep the root in the namespace of the Lease, under the Lease's name."""
        self._client = client
        self._namespace = settings.lease_namespace
        self._name = f"{settings.lease_name}-lora"
        self._root = b""

    async def key(self, namespace: str, name: str, uid: str) -> str:
        """Return the admin key of an InferenceService.

        Raises:
            OperatorError: the root cannot be read or made.
        """
        if not self._root:
            self._root = await self._read_or_make()
        identity = f"{namespace}/{name}/{uid}".encode()
        return hmac.new(self._root, identity, hashlib.sha256).hexdigest()

    async def _read_or_make(self) -> bytes:
        try:
            return self._decode(await self._client.get(SECRET, self._namespace, self._name))
        except ApiNotFound:
            pass
        root = secrets.token_bytes(_ROOT_BYTES)
        body = {
            "apiVersion": SECRET.api_version,
            "kind": SECRET.name,
            "metadata": {
                "name": self._name,
                "namespace": self._namespace,
                "labels": {contract.LABEL_MANAGED_BY: FIELD_MANAGER},
            },
            "type": "Opaque",
            "data": {_FIELD: base64.b64encode(root).decode()},
        }
        try:
            return self._decode(await self._client.create(SECRET, self._namespace, body))
        except ApiAlreadyExists:
            return self._decode(await self._client.get(SECRET, self._namespace, self._name))

    def _decode(self, secret: dict[str, Any]) -> bytes:
        try:
            root = base64.b64decode((secret.get("data") or {}).get(_FIELD, ""), validate=True)
        except binascii.Error:
            root = b""
        if len(root) < _ROOT_BYTES:
            raise Retryable(
                f"Secret {self._namespace}/{self._name} has no {_FIELD} of {_ROOT_BYTES} bytes; delete it"
            )
        return root


def digest(key: str) -> str:
    """Return the digest by which pods know a key."""
    return hashlib.sha256(key.encode()).hexdigest()
