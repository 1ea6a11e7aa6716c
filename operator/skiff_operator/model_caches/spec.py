"""The ModelCache as frozen structs, with every default filled in. `parse` is the only entry point."""

from typing import Any, Final

import msgspec

from skiff_operator import model_uri
from skiff_operator.errors import InvalidSpec
from skiff_operator.kinds import MODEL_CACHE
from skiff_operator.resources import metadata, model_cache_claim
from skiff_operator.resources.metadata import FIELD_MANAGER
from skiff_operator.spec import SecretKey, Strict
from skiff_runtime import contract

FINALIZER: Final = f"{contract.API_GROUP}/modelcache"
DEFAULT_REVISION: Final = "main"
DEFAULT_HOST_PATH: Final = "/var/lib/skiff/models"


class Model(Strict, frozen=True):
    """The model to keep. The Secret is in the namespace of the fetchers."""

    uri: str
    revision: str | None = None
    endpoint: str | None = None
    credentials_secret_ref: SecretKey | None = None


class Claim(Strict, frozen=True):
    """A PersistentVolumeClaim that several nodes can mount: an existing one, or one that is made with this size."""

    namespace: str
    claim_name: str | None = None
    size: str | int | None = None
    storage_class_name: str | None = None


class Storage(Strict, frozen=True):
    """The place of the model, in a directory of its own: a directory of each node, or a shared claim."""

    host_path: str | None = None
    claim: Claim | None = None


class Spec(Strict, frozen=True):
    """The complete `spec`, with defaults filled in."""

    model: Model
    storage: Storage = Storage()
    node_selector: dict[str, str] = msgspec.field(default_factory=dict)
    tolerations: tuple[dict[str, Any], ...] = ()
    env: tuple[dict[str, Any], ...] = ()
    resources: dict[str, dict[str, str | int]] = msgspec.field(default_factory=dict)
    service_account_name: str | None = None
    retention_seconds: int | None = None


class ModelCache(msgspec.Struct, frozen=True, kw_only=True):
    """One ModelCache: its identity and its validated spec. `finalizers` are those of its metadata.

    `managed`: the operator made it for InferenceServices with `cache.prefetch`.
    """

    name: str
    uid: str
    generation: int
    resource_version: str
    deleting: bool
    finalizers: tuple[str, ...]
    spec: Spec
    managed: bool = False

    @property
    def directory(self) -> str:
        """The directory of the model on each node, or in the shared claim."""
        if self.claim is not None:
            return model_cache_claim.directory(self.name)
        return f"{self.spec.storage.host_path or DEFAULT_HOST_PATH}/{self.name}"

    @property
    def claim(self) -> Claim | None:
        """The shared claim that keeps the model; None if nodes do."""
        return self.spec.storage.claim

    @property
    def claim_name(self) -> str:
        """The name of the shared claim; empty if nodes keep the model. No InferenceService's claim has such a name."""
        if self.claim is None:
            return ""
        return self.claim.claim_name or f"skiff-model.{self.name}"

    @property
    def scheme(self) -> str:
        """The scheme of the model's URI."""
        return model_uri.parse(self.spec.model.uri).scheme

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
        model_uri.parse(spec.model.uri)
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
        managed=(meta.get("labels") or {}).get(contract.LABEL_MANAGED_BY) == FIELD_MANAGER,
    )


def owner_reference(cache: ModelCache) -> dict[str, Any]:
    """Return the owner reference of what is collected with the ModelCache."""
    return metadata.owner_reference(MODEL_CACHE, cache.name, cache.uid)
