"""The containers of the serving pod: `fetch`, which downloads weights once, and `runtime`, which serves."""

import math
from typing import Any, Final

from skiff_operator.resources import credentials, kernel_cache, lora_config, volumes
from skiff_operator.settings import Settings
from skiff_operator.spec import InferenceService
from skiff_runtime import contract

RUNTIME: Final = "runtime"
FETCH: Final = "fetch"
PRE_STOP_SECONDS: Final = 5
"""Delay before SIGTERM: endpoints are removed concurrently, and the pod serves until that has happened."""

_STARTUP_PERIOD_SECONDS: Final = 2
_DEFAULT_REQUESTS: Final = {
    "cpu": {"cpu": "1", "memory": "2Gi"},
    "cuda": {"cpu": "4", "memory": "16Gi"},
}
_DOWNLOAD_STORAGE: Final = {"cpu": "4Gi", "cuda": "20Gi"}
"""Default request of ephemeral storage for weights in an emptyDir: a model that fits the default memory."""
_FETCH_SHARES: Final = ("cpu", "memory", "ephemeral-storage")
_SECURITY: Final = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
}


def runtime(service: InferenceService, settings: Settings, mounts: list[dict[str, Any]]) -> dict[str, Any]:
    """Build the serving container. The end of its log goes to the pod's status, where the operator reads it."""
    common = _common(RUNTIME, service, settings, mounts)
    return {
        **common,
        "env": variables(
            *common["env"], *kernel_cache.variables(service, common["image"]), *lora_config.variables(service)
        ),
        "args": _serve_arguments(service),
        "ports": [
            {"name": contract.API_PORT_NAME, "containerPort": contract.API_PORT, "protocol": "TCP"},
        ],
        "resources": resources(service, settings),
        "startupProbe": _probe(
            contract.PATH_STARTUPZ,
            period_seconds=_STARTUP_PERIOD_SECONDS,
            failures=math.ceil(service.spec.startup.timeout_seconds / _STARTUP_PERIOD_SECONDS),
        ),
        "readinessProbe": _probe(contract.PATH_READYZ, period_seconds=2, failures=2),
        "livenessProbe": _probe(contract.PATH_LIVEZ, period_seconds=10, failures=3),
        "lifecycle": {"preStop": {"sleep": {"seconds": PRE_STOP_SECONDS}}},
    }


def fetch(service: InferenceService, settings: Settings, mounts: list[dict[str, Any]]) -> dict[str, Any]:
    """Build the init container of models that are downloaded, the only one with the credential."""
    container = {
        **_common(FETCH, service, settings, mounts),
        "args": [contract.COMMAND_FETCH, *_model_arguments(service), *_wait_arguments(service)],
        "resources": fetch_resources(service, settings),
    }
    if not service.mounted_cache.name:  # else its fetcher downloads
        secret = service.spec.model.credentials_secret_ref
        access = credentials.variables(service.source.scheme, secret)
        container["env"] = variables(*container["env"], *access)
    return container


def gpu_resource(service: InferenceService, settings: Settings) -> str:
    """Return the name of the GPUs' extended resource; each rank requests one unit."""
    return service.spec.runtime.gpu_resource_name or settings.gpu_resource_name


def gpus(service: InferenceService) -> int:
    """Count the GPUs of one pod: one for each rank."""
    return service.spec.parallelism.tensor if service.spec.runtime.device == "cuda" else 0


def resources(service: InferenceService, settings: Settings) -> dict[str, Any]:
    """Merge the user's requests and limits over the defaults, and add one GPU for each rank."""
    device, given = service.spec.runtime.device, service.spec.resources
    defaults = dict(_DEFAULT_REQUESTS[device])
    if volumes.downloads_to_node(service):
        defaults["ephemeral-storage"] = _DOWNLOAD_STORAGE[device]
    limits = dict(given.get("limits", {}))
    requests = {
        **{name: limits.get(name, value) for name, value in defaults.items()},
        **given.get("requests", {}),
    }
    if count := gpus(service):
        limits[gpu_resource(service, settings)] = str(count)
    return {**given, "requests": requests, **({"limits": limits} if limits else {})}


def fetch_resources(service: InferenceService, settings: Settings) -> dict[str, Any]:
    """Return the resources of the download: those of the server, unless the spec has its own.

    The two containers never run at the same time, and a pod's request is the larger of the two: so this costs
    nothing, and a quota or a LimitRange that admits the server admits the download.
    """
    given, server = service.spec.model.fetch.resources, resources(service, settings)
    named = {name for group in given.values() for name in group}
    shared = [name for name in _FETCH_SHARES if name not in named]
    merged = {
        group: {name: server[group][name] for name in shared if name in server.get(group, {})}
        | given.get(group, {})
        for group in ("requests", "limits")
    }
    return {group: amounts for group, amounts in merged.items() if amounts}


def _common(
    name: str, service: InferenceService, settings: Settings, mounts: list[dict[str, Any]]
) -> dict[str, Any]:
    runtime = service.spec.runtime
    home = {"name": "HOME", "value": volumes.SCRATCH_DIRECTORY}
    endpoint = credentials.endpoint(service.source.scheme, service.spec.model.endpoint)
    return {
        "name": name,
        "image": runtime.image or settings.runtime_image(runtime.device),
        "command": ["skiff"],
        "env": variables(home, *runtime.env, *endpoint),
        "volumeMounts": mounts,
        "securityContext": _SECURITY,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def variables(*entries: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the last of variables with the same name: server-side apply refuses duplicate names."""
    return list({entry.get("name"): entry for entry in entries}.values())


def _model_arguments(service: InferenceService) -> list[str]:
    arguments = [contract.FLAG_MODEL, volumes.model_argument(service)]
    if service.source.is_fetched:
        if service.spec.model.revision is not None:
            arguments += [contract.FLAG_REVISION, service.spec.model.revision]
        arguments += [contract.FLAG_DOWNLOAD_DIR, volumes.download_directory(service)]
    return arguments


def _wait_arguments(service: InferenceService) -> list[str]:
    """Return the flag with which the download waits for that of a ModelCache's fetcher, and reads no source itself."""
    return [contract.FLAG_WAIT] if service.mounted_cache.name else []


def _serve_arguments(service: InferenceService) -> list[str]:
    spec = service.spec
    arguments = [
        contract.COMMAND_SERVE,
        *_model_arguments(service),
        *(contract.FLAG_SERVED_MODEL_NAME, service.model_name),
        *(contract.FLAG_HOST, "0.0.0.0"),  # all addresses of the pod
        *(contract.FLAG_PORT, str(contract.API_PORT)),
        *(contract.FLAG_DEVICE, spec.runtime.device),
        *(contract.FLAG_TENSOR_PARALLEL, str(spec.parallelism.tensor)),
        *(contract.FLAG_DRAIN_TIMEOUT, str(spec.drain.timeout_seconds)),
        *(contract.FLAG_STARTUP_TIMEOUT, str(spec.startup.timeout_seconds)),
    ]
    if spec.runtime.dtype != "auto":
        arguments += [contract.FLAG_DTYPE, spec.runtime.dtype]
    if spec.runtime.max_model_len is not None:
        arguments += [contract.FLAG_MAX_MODEL_LEN, str(spec.runtime.max_model_len)]
    if spec.lora is not None:
        arguments += [
            contract.FLAG_ENABLE_LORA,
            *(contract.FLAG_MAX_LORAS, str(spec.lora.max_loras)),
            *(contract.FLAG_MAX_LORA_RANK, str(spec.lora.max_lora_rank)),
        ]
        if spec.lora.max_cpu_loras is not None:
            arguments += [contract.FLAG_MAX_CPU_LORAS, str(spec.lora.max_cpu_loras)]
        if volumes.has_adapters_volume(service):
            arguments += [contract.FLAG_LORA_DOWNLOAD_DIR, volumes.ADAPTERS_DIRECTORY]
    if spec.api_keys_secret_ref is not None:
        arguments += [contract.FLAG_API_KEY_FILE, volumes.API_KEYS_FILE]
    return [*arguments, *spec.runtime.args]


def _probe(path: str, *, period_seconds: int, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": contract.API_PORT_NAME},
        "periodSeconds": period_seconds,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }
