"""The LoRAAdapter as frozen structs, with every default filled in. `parse` is the only entry point."""

from typing import Any

import msgspec

from skiff_operator.errors import InvalidSpec
from skiff_operator.lora import report
from skiff_operator.lora.report import ObjectStatus
from skiff_operator.spec import SecretKey, Strict
from skiff_operator.workqueue import Key


class ModelRef(Strict, frozen=True):
    """The InferenceService, in the namespace of the LoRAAdapter."""

    name: str


class Spec(Strict, frozen=True):
    """The complete `spec`. `name`: for clients; the default is the name of the LoRAAdapter."""

    model_ref: ModelRef
    uri: str
    name: str | None = None
    credentials_secret_ref: SecretKey | None = None


class LoRAAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """One LoRAAdapter: its identity, its validated spec, and its last status. `created_at`: RFC 3339."""

    namespace: str
    name: str
    uid: str
    generation: int
    resource_version: str
    created_at: str
    spec: Spec
    status: ObjectStatus | None = None

    @property
    def service(self) -> Key:
        """The key of the InferenceService."""
        return self.namespace, self.spec.model_ref.name

    @property
    def served_name(self) -> str:
        """The name by which clients request the adapter."""
        return self.spec.name or self.name


def parse(obj: dict[str, Any]) -> LoRAAdapter:
    """Parse an object of the API server.

    Raises:
        InvalidSpec: a field is unknown or of the wrong type, which the schema refuses; another version wrote it.
    """
    meta = obj["metadata"]
    try:
        spec = msgspec.convert(obj.get("spec", {}), Spec)
    except msgspec.ValidationError as error:
        raise InvalidSpec(f"spec: {error}; compare it with `kubectl explain loraadapter.spec`") from error
    return LoRAAdapter(
        namespace=meta["namespace"],
        name=meta["name"],
        uid=meta["uid"],
        generation=meta["generation"],
        resource_version=meta["resourceVersion"],
        created_at=meta["creationTimestamp"],
        spec=spec,
        status=report.read(obj.get("status")),
    )
