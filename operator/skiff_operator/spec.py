"""The InferenceService as frozen structs, with every default filled in.

`parse` is the only entry point. Specs that the CRD's schema cannot refuse are refused here, once, as `InvalidSpec`
with a message that says what to change; no other module reads the raw object.
"""

import functools
import re
from typing import Any, Final, Literal

import msgspec

from skiff_operator import model_uri
from skiff_operator.errors import InvalidSpec
from skiff_runtime import contract

ANNOTATION_RESTARTED_AT: Final = f"{contract.API_GROUP}/restarted-at"
ANNOTATION_UPGRADED_AT: Final = f"{contract.API_GROUP}/upgraded-at"
"""Requests of `skiff rollout` on the InferenceService: times at which its pods shall restart or be built anew."""
ANNOTATION_PROMOTED_REVISION: Final = f"{contract.API_GROUP}/promoted-revision"
"""Request of `skiff rollout promote` on the InferenceService: the revision that is no canary any more."""

MAX_SPEC_ADAPTERS: Final = 64
_REQUEST_CHARACTERS: Final = 64
"""More of such an annotation does not count, and is not copied to pods."""
_ENDPOINT: Final = re.compile(r"https?://[A-Za-z0-9.\[\]:_-]+(/[^\s?#@]*)?")
_FETCHED: Final = ", ".join(f"{scheme}://" for scheme in contract.FETCHED_SCHEMES)
_SCALE_TO_ZERO_SECONDS: Final = 600
_MAX_WINDOW_SECONDS: Final = 3600
_TARGETS: Final = "concurrency, queuedTokens, kvCacheUtilization and ttftSeconds"
_HINT: Final = "compare it with `kubectl explain inferenceservice.spec`"


class Strict(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """Base of every part of the spec: immutable, camelCase in JSON, unknown fields refused."""


class SecretKey(Strict, frozen=True):
    """One key of a Secret in the InferenceService's namespace. The default of `key` depends on the model's scheme."""

    name: str
    key: str | None = None


class ApiKeys(Strict, frozen=True):
    """The Secret, and its key, that holds the API keys that clients must send."""

    name: str
    key: str = "keys"


class NetworkPolicy(Strict, frozen=True):
    """The connections that the pods may have. Peers and rules are those of Kubernetes' NetworkPolicy.

    `sources`: peers that may use the API; None: all pods of the namespace. `metrics_from`: further peers, which scrape.
    `egress`: rules beside DNS and the download.
    """

    sources: tuple[dict[str, Any], ...] | None = msgspec.field(name="from", default=None)
    metrics_from: tuple[dict[str, Any], ...] = ()
    egress: tuple[dict[str, list[dict[str, Any]]], ...] = ()


class EndpointPicker(Strict, frozen=True):
    """The Service of the endpoint picker that a gateway asks. Default of `name`: that of the InferenceService and `-epp`."""

    name: str | None = None
    port: int = 9002
    failure_mode: Literal["FailOpen", "FailClose"] = "FailClose"


class ParentRef(Strict, frozen=True):
    """A Gateway, or one of its listeners, to which an HTTPRoute is attached."""

    name: str
    namespace: str | None = None
    section_name: str | None = None
    port: int | None = None


class HttpRoute(Strict, frozen=True):
    """The HTTPRoute to an InferencePool. Without `hostnames` it takes the requests of every host."""

    parent_refs: tuple[ParentRef, ...]
    hostnames: tuple[str, ...] = ()


class InferencePool(Strict, frozen=True):
    """The InferencePool with the pods, for gateways with an endpoint picker, and the HTTPRoute to it, if one is wanted."""

    enabled: bool = False
    endpoint_picker: EndpointPicker = EndpointPicker()
    http_route: HttpRoute | None = None


class Fetch(Strict, frozen=True):
    """The download of a model's weights. `resources`: of its container."""

    resources: dict[str, dict[str, str | int]] = {}


class Model(Strict, frozen=True):
    """The model. `name` is the model name for clients; default: the name of the InferenceService."""

    uri: str
    name: str | None = None
    revision: str | None = None
    endpoint: str | None = None
    credentials_secret_ref: SecretKey | None = None
    fetch: Fetch = Fetch()


class Runtime(Strict, frozen=True):
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


class Parallelism(Strict, frozen=True):
    """The parallelism of one replica over its accelerators."""

    tensor: int = 1


class Cache(Strict, frozen=True):
    """The cache of downloaded weights; at most one field is set, none means a ModelCache or an emptyDir per pod.

    `prefetch`: the operator makes a ModelCache if there is none with the model.
    """

    claim_name: str | None = None
    host_path: str | None = None
    size: str | int | None = None
    prefetch: bool = False


class SharedVolume(Strict, frozen=True):
    """An existing volume that pods share, for what outlives them; exactly one field is set."""

    claim_name: str | None = None
    host_path: str | None = None


class Adapter(Strict, frozen=True):
    """A LoRA adapter: the name by which clients request it, and the URI of its files."""

    name: str
    uri: str


class Lora(Strict, frozen=True):
    """The serving of LoRA adapters. `max_loras`: adapters in GPU memory, and so in one batch; `max_cpu_loras`: in host memory.

    `cache`: None for the volume of downloaded weights, or one for each pod where pods may not write into that.
    """

    max_loras: int = 8
    max_lora_rank: int = 16
    max_cpu_loras: int | None = None
    cache: SharedVolume | None = None


class Startup(Strict, frozen=True):
    """The startup limit of a container, without downloads."""

    timeout_seconds: int = 1800


class Drain(Strict, frozen=True):
    """The time that a terminating pod has to finish its requests."""

    timeout_seconds: int = 60


class RolloutAnalysis(Strict, frozen=True):
    """The comparison of a new revision's requests with the old one's, for automatic rollback.

    `min_requests`: fewer requests of the new revision prove nothing. The others say how much worse it may be: both a
    floor and a multiple of the old revision's figure must be exceeded. `observation_seconds`: after the rollout.
    """

    enabled: bool = True
    min_requests: int = 100
    max_error_percent: int = 5
    max_error_ratio: int = 3
    max_ttft_increase_milliseconds: int = msgspec.field(name="maxTTFTIncreaseMilliseconds", default=1000)
    max_ttft_ratio: int = msgspec.field(name="maxTTFTRatio", default=3)
    max_itl_increase_milliseconds: int = msgspec.field(name="maxITLIncreaseMilliseconds", default=200)
    max_itl_ratio: int = msgspec.field(name="maxITLRatio", default=3)
    observation_seconds: int = 600


class CanaryHeader(Strict, frozen=True):
    """The header that routes a request to the canary: a name, in any case, and the whole value."""

    name: str
    value: str


class Canary(Strict, frozen=True):
    """A share of the requests for a new revision before it replaces the old one.

    `weight`: percent of the requests, and of the pods. `header`: only requests with it get to the canary, by the router.
    `sticky_by`: what stays with one revision. `min_seconds`: least time before the canary is promoted. `auto_promote`: it is
    promoted when enough requests show that it is not worse; otherwise by `skiff rollout promote` alone.
    """

    weight: int = 10
    header: CanaryHeader | None = None
    sticky_by: Literal["Conversation", "Key"] = "Conversation"
    min_seconds: int = 60
    auto_promote: bool = True


class RolloutPolicy(Strict, frozen=True):
    """The way in which pods of a new revision take the place of older ones; amounts are pods, or percentages of them.

    `revision_history_limit`: old revisions that are kept.
    """

    strategy: Literal["Auto", "Surge", "Replace"] = "Auto"
    max_surge: int | str | None = None
    max_unavailable: int | str | None = None
    progress_deadline_seconds: int | None = None
    paused: bool = False
    auto_rollback: bool = False
    analysis: RolloutAnalysis = RolloutAnalysis()
    canary: Canary | None = None
    revision_history_limit: int = 10

    @property
    def rolls_back(self) -> bool:
        """True if a new revision that fails is rolled back: always with a canary, otherwise with `auto_rollback`."""
        return self.auto_rollback or self.canary is not None


class AutoscalingTargets(Strict, frozen=True):
    """The load of one pod that autoscaling keeps; each one that is given demands its number of pods, and the largest counts.

    `concurrency`: requests that run or wait. `queued_tokens`: prompt tokens of waiting requests.
    `kv_cache_utilization`: percent of the KV cache that running requests occupy. `ttft_seconds`: mean time to first token.
    """

    concurrency: int | None = None
    queued_tokens: int | None = None
    kv_cache_utilization: int | None = None
    ttft_seconds: float | None = None

    @property
    def given(self) -> dict[str, float]:
        """The targets that are set, by their names in the spec."""
        return {
            field.encode_name: value
            for field in msgspec.structs.fields(self)
            if (value := getattr(self, field.name)) is not None
        }


class Autoscaling(Strict, frozen=True):
    """The number of pods by their load. The autoscaler writes `spec.replicas` by the subresource `scale`, as any other does.

    `engine`: Builtin is the operator itself; of the others it makes the objects.
    `scale_down_delay_seconds`: fewer pods must have been enough for this long. `scale_to_zero_after_seconds`: time without
    a request after which no pod is left, if `min_replicas` is 0.
    """

    max_replicas: int
    min_replicas: int = 1
    targets: AutoscalingTargets = AutoscalingTargets(concurrency=32)
    scale_down_delay_seconds: int = 300
    scale_to_zero_after_seconds: int | None = None
    engine: Literal["Builtin", "HPA", "KEDA"] = "Builtin"

    @property
    def idle_seconds(self) -> int:
        """The time without a request after which no pod is left."""
        after = self.scale_to_zero_after_seconds
        return _SCALE_TO_ZERO_SECONDS if after is None else after


class Spec(Strict, frozen=True):
    """The complete `spec`, with defaults filled in: `adapters` imply `lora`."""

    model: Model
    lora: Lora | None = None
    adapters: tuple[Adapter, ...] = ()
    runtime: Runtime = Runtime()
    parallelism: Parallelism = Parallelism()
    replicas: int = 1
    autoscaling: Autoscaling | None = None
    cache: Cache = Cache()
    kernel_cache: SharedVolume | None = None
    startup: Startup = Startup()
    drain: Drain = Drain()
    rollout: RolloutPolicy = RolloutPolicy()
    api_keys_secret_ref: ApiKeys | None = None
    network_policy: NetworkPolicy | None = None
    inference_pool: InferencePool | None = None
    resources: dict[str, dict[str, str | int]] = {}
    node_selector: dict[str, str] = {}
    tolerations: tuple[dict[str, Any], ...] = ()
    pod_template: dict[str, Any] = {}

    @property
    def most_replicas(self) -> int:
        """The largest number of pods without an edit of the spec by its owner."""
        return (
            self.replicas if self.autoscaling is None else max(self.replicas, self.autoscaling.max_replicas)
        )

    @property
    def pool(self) -> InferencePool | None:
        """The InferencePool to be made; None for none."""
        return (
            self.inference_pool if self.inference_pool is not None and self.inference_pool.enabled else None
        )


class MountedCache(msgspec.Struct, frozen=True):
    """The ModelCache that pods mount; its name is empty for none. `claim`: the shared claim on which it keeps the model."""

    name: str = ""
    claim: str = ""


class InferenceService(msgspec.Struct, frozen=True, kw_only=True):
    """One InferenceService: its identity, its validated spec, and the last requests to restart, upgrade and promote its pods.

    `model_cache` is the ModelCache that its pods mount, None before it is chosen.
    """

    namespace: str
    name: str
    uid: str
    generation: int
    spec: Spec
    restarted_at: str = ""
    upgraded_at: str = ""
    promoted_revision: str = ""
    model_cache: MountedCache | None = None

    @property
    def mounted_cache(self) -> MountedCache:
        """The chosen ModelCache, none before it is chosen."""
        return self.model_cache or MountedCache()

    @property
    def model_name(self) -> str:
        """The model name for clients."""
        return self.spec.model.name or self.name

    @property
    def requests(self) -> tuple[str, str]:
        """The times of the last requests to restart and to upgrade the pods."""
        return self.restarted_at, self.upgraded_at

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
    if spec.adapters and spec.lora is None:
        spec = msgspec.structs.replace(spec, lora=Lora())
    restarted_at, upgraded_at = requests(obj)
    return InferenceService(
        namespace=meta["namespace"],
        name=meta["name"],
        uid=meta["uid"],
        generation=meta["generation"],
        spec=spec,
        restarted_at=restarted_at,
        upgraded_at=upgraded_at,
        promoted_revision=promoted_revision(obj),
    )


def promoted_revision(obj: dict[str, Any]) -> str:
    """Return the revision that was promoted by request; empty without one."""
    return _request(obj, ANNOTATION_PROMOTED_REVISION)


def requests(obj: dict[str, Any]) -> tuple[str, str]:
    """Return the times of the last requests to restart and to upgrade the pods; empty without one."""
    return _request(obj, ANNOTATION_RESTARTED_AT), _request(obj, ANNOTATION_UPGRADED_AT)


def _request(obj: dict[str, Any], annotation: str) -> str:
    value: str = (obj["metadata"].get("annotations") or {}).get(annotation, "")
    return value[:_REQUEST_CHARACTERS]


def has_same_source(old: Spec, new: Spec) -> bool:
    """Return whether an edit keeps the model and its storage: then it is no reason to choose a ModelCache."""
    return (old.model, old.cache) == (new.model, new.cache)


def explicit(part: msgspec.Struct, *, skip: tuple[str, ...] = ()) -> dict[str, Any]:
    """Convert a part of the spec to plain camelCase builtins, without the fields that have their default value.

    `skip`: names of fields in the same spelling, which are left out as well.
    """
    found = {}
    for each in _fields(type(part)):
        value = getattr(part, each.name)
        if each.encode_name in skip or value == _default(each):
            continue
        found[each.encode_name] = (
            explicit(value) if isinstance(value, msgspec.Struct) else msgspec.to_builtins(value)
        )
    return found


@functools.cache
def _fields(kind: type[msgspec.Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    """Return the fields of a struct; the package evaluates all of its annotations for that, which takes 0.1 ms and more."""
    return msgspec.structs.fields(kind)


def _default(field: msgspec.structs.FieldInfo) -> object:
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return field.default


def to_dict(spec: Spec) -> dict[str, Any]:
    """Convert `spec` back to plain camelCase builtins, defaults included."""
    result: dict[str, Any] = msgspec.to_builtins(spec)
    return result


def _check(spec: Spec) -> None:
    source = model_uri.parse(spec.model.uri)
    given = sum(value is not None for value in (spec.cache.claim_name, spec.cache.host_path, spec.cache.size))
    if given > 1:
        raise InvalidSpec("spec.cache: set only one of claimName, hostPath and size")
    if spec.cache.prefetch and given:
        raise InvalidSpec(
            "spec.cache.prefetch: the model is kept by a ModelCache; remove claimName, hostPath and size"
        )
    if source.scheme != "hf" and spec.model.revision is not None:
        raise InvalidSpec("spec.model.revision: only hf:// models have revisions; remove it")
    if not source.is_fetched:
        for field, value in (
            ("credentialsSecretRef", spec.model.credentials_secret_ref),
            ("endpoint", spec.model.endpoint),
            ("fetch", spec.model.fetch if spec.model.fetch != Fetch() else None),
        ):
            if value is not None:
                raise InvalidSpec(f"spec.model.{field}: only {_FETCHED} models are downloaded; remove it")
    secret = spec.model.credentials_secret_ref
    if source.scheme == "s3" and secret is not None and secret.key is not None:
        raise InvalidSpec(
            "spec.model.credentialsSecretRef.key: an s3:// model takes the keys AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY of the Secret; remove it"
        )
    if spec.model.endpoint is not None and not _ENDPOINT.fullmatch(spec.model.endpoint):
        raise InvalidSpec(
            "spec.model.endpoint: must be an http:// or https:// address without user and password"
        )
    kernels = spec.kernel_cache
    if kernels is not None:
        _check_shared_volume(kernels, "spec.kernelCache")
        if spec.runtime.device != "cuda":
            raise InvalidSpec("spec.kernelCache: only device cuda compiles kernels; remove it")
    if spec.runtime.device != "cuda" and spec.runtime.gpu_resource_name is not None:
        raise InvalidSpec("spec.runtime.gpuResourceName: only device cuda takes GPUs; remove it")
    if spec.autoscaling is not None:
        _check_autoscaling(spec.autoscaling)
    if spec.lora is not None:
        _check_lora(spec.lora)
    if len(spec.adapters) > MAX_SPEC_ADAPTERS:
        raise InvalidSpec(
            f"spec.adapters: at most {MAX_SPEC_ADAPTERS} adapters; make LoRAAdapters of the others"
        )
    if spec.replicas < 0 or spec.parallelism.tensor < 1:
        raise InvalidSpec("spec.replicas must be 0 or more, and spec.parallelism.tensor 1 or more")


def _check_lora(lora: Lora) -> None:
    for name, value, limit in (
        ("maxLoras", lora.max_loras, contract.MAX_LORAS),
        ("maxLoraRank", lora.max_lora_rank, contract.MAX_LORA_RANK),
    ):
        if not 1 <= value <= limit:
            raise InvalidSpec(f"spec.lora.{name}: must be 1 to {limit}")
    if lora.max_cpu_loras is not None and lora.max_cpu_loras < lora.max_loras:
        raise InvalidSpec(
            f"spec.lora.maxCpuLoras: {lora.max_cpu_loras} is less than maxLoras, {lora.max_loras}, whose adapters are in host "
            "memory, too; raise it, or lower maxLoras"
        )
    if lora.cache is not None:
        _check_shared_volume(lora.cache, "spec.lora.cache")


def _check_shared_volume(volume: SharedVolume, where: str) -> None:
    if (volume.claim_name is None) == (volume.host_path is None):
        field = where.rpartition(".")[2]
        raise InvalidSpec(f"{where}: set exactly one of claimName and hostPath, or remove {field}")


def _check_autoscaling(autoscaling: Autoscaling) -> None:
    where: Final = "spec.autoscaling"
    least, most = autoscaling.min_replicas, autoscaling.max_replicas
    if least < 0 or most < 1:
        raise InvalidSpec(f"{where}: minReplicas must be 0 or more, and maxReplicas 1 or more")
    if least > most:
        raise InvalidSpec(
            f"{where}.minReplicas: {least} exceeds maxReplicas, {most}; lower it, or raise maxReplicas"
        )
    given = autoscaling.targets.given
    if not given:
        raise InvalidSpec(f"{where}.targets: set at least one of {_TARGETS}, or remove targets")
    for name, value in given.items():
        if not value > 0:
            raise InvalidSpec(f"{where}.targets.{name}: must be greater than 0")
    if autoscaling.scale_to_zero_after_seconds is not None and least > 0:
        raise InvalidSpec(
            f"{where}.scaleToZeroAfterSeconds: {least} pods always stay; remove it, or set minReplicas to 0"
        )
    if autoscaling.engine != "Builtin" and autoscaling.scale_down_delay_seconds > _MAX_WINDOW_SECONDS:
        raise InvalidSpec(
            f"{where}.scaleDownDelaySeconds: a HorizontalPodAutoscaler allows {_MAX_WINDOW_SECONDS} at most; lower it, "
            "or use engine Builtin"
        )
    if autoscaling.engine == "HPA" and least == 0:
        raise InvalidSpec(
            f"{where}.minReplicas: a HorizontalPodAutoscaler keeps at least one pod; set 1, or use engine Builtin or KEDA"
        )
    if autoscaling.engine == "HPA" and autoscaling.targets.ttft_seconds is not None:
        raise InvalidSpec(
            f"{where}.targets.ttftSeconds: a HorizontalPodAutoscaler reads gauges only; remove it, or use engine Builtin "
            "or KEDA"
        )
