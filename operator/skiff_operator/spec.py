"""The InferenceService as frozen structs, with every default filled in.

`parse` is the only entry point. Specs that the CRD's schema cannot refuse are refused here, once, as `InvalidSpec`
with a message that says what to change; no other module reads the raw object.
"""

from typing import Any, Final, Literal

import msgspec

from skiff_operator import model_uri
from skiff_operator.errors import InvalidSpec

_HINT: Final = "compare it with `kubectl explain inferenceservice.spec`"


class _Strict(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """Base of every part of the spec: immutable, camelCase in JSON, unknown fields refused."""


class SecretKey(_Strict, frozen=True):
    """One key of a Secret in the InferenceService's namespace."""

    name: str
    key: str = "token"


class Fetch(_Strict, frozen=True):
    """The download of an hf:// model's weights. `resources`: of its container."""

    resources: dict[str, dict[str, str | int]] = {}


class Model(_Strict, frozen=True):
    """The model. `name` is the model name for clients; default: the name of the InferenceService."""

    uri: str
    name: str | None = None
    revision: str | None = None
    credentials_secret_ref: SecretKey | None = None
    fetch: Fetch = Fetch()


class Runtime(_Strict, frozen=True):
    """The start of the serving container. `max_model_len` counts tokens.

    `gpu_resource_name`: the extended resource that each rank requests once; default: the operator's.
    """

    image: str | None = None
    args: tuple[str, ...] = ()
    env: tuple[dict[str, Any], ...] = ()
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_model_len: int | None = None
    device: Literal["cuda", "cpu"] = "cuda"
    gpu_resource_name: str | None = None


class Parallelism(_Strict, frozen=True):
    """The parallelism of one replica over its accelerators."""

    tensor: int = 1


class Cache(_Strict, frozen=True):
    """The cache of downloaded weights; at most one field is set, none means an emptyDir per pod."""

    claim_name: str | None = None
    host_path: str | None = None
    size: str | int | None = None


class Startup(_Strict, frozen=True):
    """The startup limit of a container, without downloads."""

    timeout_seconds: int = 1800


class Drain(_Strict, frozen=True):
    """The time that a terminating pod has to finish its requests."""

    timeout_seconds: int = 60


class Spec(_Strict, frozen=True):
    """The complete `spec`, with defaults filled in."""

    model: Model
    runtime: Runtime = Runtime()
    parallelism: Parallelism = Parallelism()
    replicas: int = 1
    cache: Cache = Cache()
    startup: Startup = Startup()
    drain: Drain = Drain()
    resources: dict[str, dict[str, str | int]] = {}
    node_selector: dict[str, str] = {}
    tolerations: tuple[dict[str, Any], ...] = ()
    pod_template: dict[str, Any] = {}


class InferenceService(msgspec.Struct, frozen=True, kw_only=True):
    """One InferenceService: its identity and its validated spec.

    `model_cache` is the ModelCache that its pods mount: empty for none, None before it is chosen.
    """

    namespace: str
    name: str
    uid: str
    generation: int
    spec: Spec
    model_cache: str | None = None

    @property
    def model_name(self) -> str:
        """The model name for clients."""
        return self.spec.model.name or self.name

    @property
    def source(self) -> model_uri.Source:
        """The parsed model URI."""
        return model_uri.parse(self.spec.model.uri)


def parse(obj: dict[str, Any]) -> InferenceService:
    """Parse an object of the API server.

    Raises:
        InvalidSpec: a field is unknown, of the wrong type, or contradicts another.
    """
    meta = obj["metadata"]
    try:
        spec = msgspec.convert(obj.get("spec", {}), Spec)
    except msgspec.ValidationError as error:
        raise InvalidSpec(f"spec: {error}; {_HINT}") from error
    _check(spec)
    return InferenceService(
        namespace=meta["namespace"],
        name=meta["name"],
        uid=meta["uid"],
        generation=meta["generation"],
        spec=spec,
    )


def to_dict(spec: Spec) -> dict[str, Any]:
    """Convert `spec` back to plain camelCase builtins, defaults included."""
    result: dict[str, Any] = msgspec.to_builtins(spec)
    return result


def _check(spec: Spec) -> None:
    source = model_uri.parse(spec.model.uri)
    if sum(value is not None for value in (spec.cache.claim_name, spec.cache.host_path, spec.cache.size)) > 1:
        raise InvalidSpec("spec.cache: set only one of claimName, hostPath and size")
    if source.scheme != "hf":
        if spec.model.revision is not None:
            raise InvalidSpec("spec.model.revision: only hf:// models have revisions; remove it")
        if spec.model.credentials_secret_ref is not None:
            raise InvalidSpec("spec.model.credentialsSecretRef: only hf:// models are downloaded; remove it")
        if spec.model.fetch != Fetch():
            raise InvalidSpec("spec.model.fetch: only hf:// models are downloaded; remove it")
    if spec.runtime.device != "cuda" and spec.runtime.gpu_resource_name is not None:
        raise InvalidSpec("spec.runtime.gpuResourceName: only device cuda takes GPUs; remove it")
    if spec.replicas < 0 or spec.parallelism.tensor < 1:
        raise InvalidSpec("spec.replicas must be 0 or more, and spec.parallelism.tensor 1 or more")
