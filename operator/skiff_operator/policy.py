"""Policy checks: specs that the schema allows and this operator refuses, by its settings or by other fields."""

from typing import Final

from skiff_operator import canary, model_uri, rollout_strategy
from skiff_operator.errors import InvalidSpec
from skiff_operator.resources import containers, overlay
from skiff_operator.settings import Settings
from skiff_operator.spec import InferenceService
from skiff_runtime import contract

_OWNED_FLAGS: Final = {
    contract.FLAG_MODEL: "spec.model.uri",
    contract.FLAG_REVISION: "spec.model.revision",
    contract.FLAG_SERVED_MODEL_NAME: "spec.model.name",
    contract.FLAG_DOWNLOAD_DIR: "spec.cache",
    contract.FLAG_HOST: "",
    contract.FLAG_PORT: "",
    contract.FLAG_DEVICE: "spec.runtime.device",
    contract.FLAG_DTYPE: "spec.runtime.dtype",
    contract.FLAG_TENSOR_PARALLEL: "spec.parallelism.tensor",
    contract.FLAG_TENSOR_PARALLEL_SIZE: "spec.parallelism.tensor",
    contract.FLAG_MAX_MODEL_LEN: "spec.runtime.maxModelLen",
    contract.FLAG_DRAIN_TIMEOUT: "spec.drain.timeoutSeconds",
    contract.FLAG_STARTUP_TIMEOUT: "spec.startup.timeoutSeconds",
    contract.FLAG_ENABLE_LORA: "spec.lora",
    contract.FLAG_LORA: "spec.adapters",
    contract.FLAG_MAX_LORAS: "spec.lora.maxLoras",
    contract.FLAG_MAX_LORA_RANK: "spec.lora.maxLoraRank",
    contract.FLAG_MAX_CPU_LORAS: "spec.lora.maxCpuLoras",
    contract.FLAG_LORA_DOWNLOAD_DIR: "spec.lora.cache",
}


def check(service: InferenceService, settings: Settings) -> None:
    """Raise `InvalidSpec` with a message that says what to change; return when the service can be built."""
    _check_host_paths(service, settings)
    _check_prefetch(service, settings)
    _check_arguments(service)
    _check_gpus(service, settings)
    _check_engine(service, settings)
    _check_inference_pool(service, settings)
    rollout_strategy.check(service.spec.rollout)
    canary.check(service.spec.rollout)
    overlay.check(service.spec.pod_template, allow_host_path=settings.allow_host_path)


def _check_host_paths(service: InferenceService, settings: Settings) -> None:
    if settings.allow_host_path:
        return
    if service.source.scheme == "file":
        raise InvalidSpec(
            "spec.model.uri: file:// models need a hostPath, which the restricted Pod Security level forbids; "
            "use pvc://, hf://, s3://, gs:// or oci://, or start the operator with --allow-host-path"
        )
    if service.spec.cache.host_path is not None:
        raise InvalidSpec(
            "spec.cache.hostPath: host paths are off; use claimName or size, "
            "or start the operator with --allow-host-path"
        )

    lora = service.spec.lora
    for where, volume in (
        ("spec.lora.cache", lora.cache if lora is not None else None),
        ("spec.kernelCache", service.spec.kernel_cache),
    ):
        if volume is not None and volume.host_path is not None:
            raise InvalidSpec(
                f"{where}.hostPath: host paths are off; use claimName, or start the operator with --allow-host-path"
            )


def _check_prefetch(service: InferenceService, settings: Settings) -> None:
    if not service.spec.cache.prefetch:
        return
    model = service.spec.model
    if not settings.model_caches:
        raise InvalidSpec(
            "spec.cache.prefetch: ModelCaches are off; remove it, or start the operator with --model-caches"
        )
    if model.credentials_secret_ref is not None:
        raise InvalidSpec(
            "spec.cache.prefetch: fetchers run in the operator's namespace and cannot read "
            f"Secret {model.credentials_secret_ref.name}; remove prefetch, and let an administrator make a ModelCache with "
            "credentials, which is used by itself"
        )
    if model_uri.address(service.source.scheme, model.endpoint, service.spec.runtime.env) is None:
        raise InvalidSpec(
            f"spec.cache.prefetch: {model_uri.ENDPOINTS[service.source.scheme]} in spec.runtime.env has no value that the "
            "operator can read; set spec.model.endpoint instead"
        )


def _check_arguments(service: InferenceService) -> None:
    owned = dict(_OWNED_FLAGS)
    if service.spec.api_keys_secret_ref is not None:
        owned[contract.FLAG_API_KEY_FILE] = "spec.apiKeysSecretRef alone"
    for argument in service.spec.runtime.args:
        flag = argument.partition("=")[0]
        if flag == contract.FLAG_KERNEL_CACHE_DIR and service.spec.kernel_cache is not None:
            raise InvalidSpec(f"spec.runtime.args: {flag} is set by spec.kernelCache; remove one of them")
        if flag in owned:
            advice = f"use {owned[flag]}" if owned[flag] else "remove it"
            raise InvalidSpec(f"spec.runtime.args: {flag} is set by the operator; {advice}")


def _check_gpus(service: InferenceService, settings: Settings) -> None:
    name, wanted = containers.gpu_resource(service, settings), containers.gpus(service)
    for group in ("requests", "limits"):
        given = service.spec.resources.get(group, {}).get(name)
        if given is not None and str(given) != str(wanted):
            raise InvalidSpec(
                f"spec.resources.{group}[{name}] is {given}, but the pod needs {wanted} "
                "by spec.parallelism.tensor and spec.runtime.device; remove it"
            )


def field_of(flag: str) -> str:
    """Return the field of the spec that decides a flag of `skiff serve`; empty if none does."""
    return _OWNED_FLAGS.get(flag, "")


def _check_engine(service: InferenceService, settings: Settings) -> None:
    autoscaling = service.spec.autoscaling
    if autoscaling is None or autoscaling.engine in ("Builtin", *settings.autoscaling_engines):
        return
    raise InvalidSpec(
        f"spec.autoscaling.engine: {autoscaling.engine} is off; use engine Builtin, or start the operator with "
        f"--autoscaling-engines={autoscaling.engine} (autoscaling.engines in the chart)"
    )


def _check_inference_pool(service: InferenceService, settings: Settings) -> None:
    if service.spec.pool is not None and not settings.inference_pools:
        raise InvalidSpec(
            "spec.inferencePool: InferencePools are off; set enabled to false, or start the operator with --inference-pools "
            "(inferencePools.enabled in the chart)"
        )
