"""The ModelCache as frozen structs, with every default filled in. `parse` is the only entry point."""

from typing import Any, Final

import msgspec

from skiff_operator.errors import InvalidSpec
from skiff_runtime import contract

FINALIZER: Final = f"{contract.API_GROUP}/modelcache"
DEFAULT_REVISION: Final = "main"


class _Strict(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """Base of every part of the spec: immutable, camelCase in JSON, unknown fields refused."""


class SecretKey(_Strict, frozen=True):
    """One key of a Secret in the operator's namespace."""

    name: str
    key: str = "token"


class Model(_Strict, frozen=True):
    """The model to keep."""

    uri: str
    revision: str | None = None
    credentials_secret_ref: SecretKey | None = None


class Storage(_Strict, frozen=True):
    """The directory of each node; the model is in a directory of its own inside of it."""

    host_path: str = "/var/lib/skiff/models"


class Spec(_Strict, frozen=True):
    """The complete `spec`, with defaults filled in."""

    model: Model
    storage: Storage = Storage()
    node_selector: dict[str, str] = {}
    tolerations: tuple[dict[str, Any], ...] = ()
    env: tuple[dict[str, Any], ...] = ()
    resources: dict[str, dict[str, str | int]] = {}
    retention_seconds: int | None = None


class ModelCache(msgspec.Struct, frozen=True, kw_only=True):
    """One ModelCache: its identity and its validated spec. `finalizers` are those of its metadata."""

    name: str
    uid: str
    generation: int
    resource_version: str
    deleting: bool
    finalizers: tuple[str, ...]
    spec: Spec

    @property
    def directory(self) -> str:
        """The directory of the model on each node."""
        return f"{self.spec.storage.host_path}/{self.name}"

    @property
    def revision(self) -> str:
        """The revision, with the hub's default filled in."""
        return self.spec.model.revision or DEFAULT_REVISION


def parse(obj: dict[str, Any]) -> ModelCache:
    """Parse an object of the API server.

    Raises:
        InvalidSpec: a field is unknown or of the wrong type, which the schema refuses; another version wrote it.
    """
    meta = obj["metadata"]
    try:
        spec = msgspec.convert(obj.get("spec", {}), Spec)
    except msgspec.ValidationError as error:
        raise InvalidSpec(f"spec: {error}; compare it with `kubectl explain modelcache.spec`") from error
    return ModelCache(
        name=meta["name"],
        uid=meta["uid"],
        generation=meta["generation"],
        resource_version=meta["resourceVersion"],
        deleting="deletionTimestamp" in meta,
        finalizers=tuple(meta.get("finalizers") or ()),
        spec=spec,
    )


def owner_reference(cache: ModelCache) -> dict[str, Any]:
    """Return the owner reference of what is collected with the ModelCache."""
    return {
        "apiVersion": f"{contract.API_GROUP}/{contract.API_VERSION}",
        "kind": "ModelCache",
        "name": cache.name,
        "uid": cache.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
