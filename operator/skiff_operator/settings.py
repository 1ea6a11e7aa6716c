"""Settings of the operator process: flags and environment, validated once into one frozen dataclass.

Each flag is also read from the environment: `--log-level` from `SKIFF_OPERATOR_LOG_LEVEL`; the flag wins.
"""

import argparse
import importlib.metadata
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

from skiff_operator.errors import SettingsError
from skiff_runtime import contract

ENV_PREFIX: Final = "SKIFF_OPERATOR_"
IMAGE_REPOSITORY: Final = "ghcr.io/skiff-dev"
_RESOURCE_NAME: Final = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?/[A-Za-z0-9]([-_.A-Za-z0-9]*[A-Za-z0-9])?")
"""An extended resource: a domain and a name."""
_OBJECT_NAME: Final = re.compile(r"(?=.{1,253}\Z)[a-z0-9]([-.a-z0-9]*[a-z0-9])?")
UPGRADE_POLICIES: Final = ("Manual", "Waves")
AUTOSCALING_ENGINES: Final = ("HPA", "KEDA")
VERSION: Final = importlib.metadata.version("skiff")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of one operator process. Durations are seconds."""

    namespaces: tuple[str, ...] = ()
    runtime_image_cpu: str = f"{IMAGE_REPOSITORY}/runtime-cpu:{VERSION}"
    runtime_image_cuda: str = f"{IMAGE_REPOSITORY}/runtime-cuda:{VERSION}"
    default_image_pull_secrets: tuple[str, ...] = ()
    allow_host_path: bool = False
    allow_privileged_pods: bool = False
    model_caches: bool = False
    model_cache_chown: bool = True
    router_exclusive: bool = False
    gpu_resource_name: str = "nvidia.com/gpu"
    upgrade_policy: str = "Manual"
    upgrade_max_unavailable: int = 1
    rollback_after_seconds: float = 60.0
    rollout_metrics_seconds: float = 10.0
    autoscaling_seconds: float = 1.0
    autoscaling_engines: tuple[str, ...] = ()
    prometheus_address: str = ""
    inference_pools: bool = False
    workers: int = 8
    resync_seconds: float = 30.0
    watch_timeout_seconds: int = 300
    status_delay_seconds: float = 0.5
    read_startup_phases: bool = True
    leader_elect: bool = True
    lease_name: str = "skiff-operator"
    lease_namespace: str = "skiff-system"
    lease_duration_seconds: int = 30
    lease_renew_seconds: float = 10.0
    identity: str = ""
    health_port: int = contract.OPERATOR_HEALTH_PORT
    metrics_port: int = contract.OPERATOR_METRICS_PORT
    log_level: str = "info"

    def __post_init__(self) -> None:
        """Validate the values; errors name the flag."""
        for name in (
            "upgrade_max_unavailable",
            "rollback_after_seconds",
            "rollout_metrics_seconds",
            "autoscaling_seconds",
            "workers",
            "resync_seconds",
            "watch_timeout_seconds",
            "lease_duration_seconds",
            "lease_renew_seconds",
        ):
            if getattr(self, name) <= 0:
                raise SettingsError(f"{_flag(name)} must be greater than 0")
        for name in ("health_port", "metrics_port"):
            if not 0 <= getattr(self, name) < 65536:
                raise SettingsError(f"{_flag(name)} must be a port number")
        if self.model_caches and self.namespaces:
            raise SettingsError("--model-caches needs an operator of all namespaces; omit --namespaces")
        if not _RESOURCE_NAME.fullmatch(self.gpu_resource_name):
            raise SettingsError("--gpu-resource-name must be DOMAIN/NAME, such as nvidia.com/gpu")
        for secret in self.default_image_pull_secrets:
            if not _OBJECT_NAME.fullmatch(secret):
                raise SettingsError(f"--default-image-pull-secrets: {secret!r} is no name of a Secret")
        if self.lease_renew_seconds * 2 > self.lease_duration_seconds:
            raise SettingsError("--lease-renew-seconds must be at most half of --lease-duration-seconds")
        if self.upgrade_policy not in UPGRADE_POLICIES:
            raise SettingsError(f"--upgrade-policy must be {' or '.join(UPGRADE_POLICIES)}")
        for engine in self.autoscaling_engines:
            if engine not in AUTOSCALING_ENGINES:
                raise SettingsError(f"--autoscaling-engines must be among {', '.join(AUTOSCALING_ENGINES)}")
        if "KEDA" in self.autoscaling_engines and not self.prometheus_address:
            raise SettingsError(
                "--autoscaling-engines=KEDA needs --prometheus-address, from which KEDA reads"
            )
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise SettingsError("--log-level must be debug, info, warning or error")

    def runtime_image(self, device: str) -> str:
        """Return the default image of serving pods for a device type."""
        return self.runtime_image_cuda if device == "cuda" else self.runtime_image_cpu

    @property
    def stale_after_seconds(self) -> float:
        """A resync older than this fails the liveness probe."""
        return 4 * self.resync_seconds

    def watch_scope(self, namespace: str) -> str | None:
        """Return the scope of the watch streams that cover `namespace`: a namespace, or None for all."""
        return namespace if self.namespaces else None

    @property
    def watch_inactivity_seconds(self) -> float:
        """A watch without events for this long is requested again, because its connection may be dead."""
        return min(1.5 * self.watch_timeout_seconds, 120.0)

    @property
    def stream_dead_after_seconds(self) -> float:
        """A watch stream without activity for this long fails the liveness probe: two new requests had no response."""
        return 3 * self.watch_inactivity_seconds


_HELP: Final = {
    "namespaces": "watch only these namespaces, separated by commas (default: all)",
    "runtime_image_cpu": "image of pods with device cpu whose spec names none",
    "runtime_image_cuda": "image of pods with device cuda whose spec names none",
    "default_image_pull_secrets": "Secrets of its own namespace with which each pod pulls images, separated by commas",
    "allow_host_path": "permit file:// models and cache.hostPath, which the restricted Pod Security level forbids",
    "allow_privileged_pods": "permit in podTemplate what the restricted Pod Security level forbids, "
    "other ServiceAccounts, and tokens of the API server",
    "model_caches": "serve ModelCaches, whose fetchers run in the namespace of the Lease; needs all namespaces",
    "model_cache_chown": "give directories of ModelCaches to the fetchers' user by an init container that is root",
    "router_exclusive": "where spec.networkPolicy has no from, only the namespace of the Lease, in which the router is, may "
    "use the API, and not the pods of the InferenceService's own namespace",
    "gpu_resource_name": "extended resource that each rank requests once, when the spec names none",
    "upgrade_policy": "Manual: pods keep the template of an older operator until `skiff rollout upgrade`; "
    "Waves: a few InferenceServices at a time adopt the present one",
    "upgrade_max_unavailable": "InferenceServices that adopt a new template at the same time, with Waves",
    "rollback_after_seconds": "a revision that fails for this long is rolled back, if the spec has autoRollback",
    "rollout_metrics_seconds": "pods' metrics are read this often during and after a rollout, if the spec has autoRollback",
    "autoscaling_seconds": "the number of pods is decided this often, if the spec has autoscaling",
    "autoscaling_engines": "permit spec.autoscaling.engine HPA or KEDA, separated by commas, beside Builtin",
    "prometheus_address": "Prometheus from which KEDA reads, such as http://prometheus.monitoring:9090",
    "inference_pools": "permit spec.inferencePool: InferencePools and HTTPRoutes of the Gateway API, which must be installed",
    "workers": "InferenceServices reconciled at the same time",
    "resync_seconds": "every InferenceService that is not backing off is looked at again this often, from the cache",
    "watch_timeout_seconds": "the API server ends each watch request after this long; load balancers may need less",
    "status_delay_seconds": "changes of status are collected this long before they are written",
    "read_startup_phases": "read the server's start phases, once from each pod that becomes ready, by one GET at its IP",
    "leader_elect": "wait for the Lease before working; needed with more than one replica",
    "lease_name": "name of the Lease",
    "lease_namespace": "namespace of the Lease",
    "lease_duration_seconds": "a leader that has not renewed for this long is considered gone",
    "lease_renew_seconds": "the leader renews this often",
    "identity": "this process's name in the Lease (default: POD_NAME, else the host's name and process id)",
    "health_port": "port of /healthz and /readyz",
    "metrics_port": "port of /metrics",
    "log_level": "debug, info, warning or error",
}


def from_arguments(argv: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """Read settings: flags override the environment, which overrides defaults.

    Raises:
        SettingsError: a value has the wrong type or is out of range.
    """
    parser = argparse.ArgumentParser(prog="skiff-operator", description="The Skiff operator for Kubernetes.")
    for field in fields(Settings):
        text = environ.get(ENV_PREFIX + field.name.upper())
        default = field.default if text is None else _convert(field.name, text)
        if isinstance(field.default, bool):
            parser.add_argument(
                _flag(field.name),
                action=argparse.BooleanOptionalAction,
                default=default,
                help=_HELP[field.name],
            )
        else:
            parser.add_argument(_flag(field.name), default=default, help=f"{_HELP[field.name]} ({default!r})")
    values = vars(parser.parse_args(argv))
    converted: dict[str, Any] = {
        name: _convert(name, value) if isinstance(value, str) else value for name, value in values.items()
    }
    converted["identity"] = converted["identity"] or _default_identity(environ)
    return Settings(**converted)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _default_identity(environ: Mapping[str, str]) -> str:
    """Return the host name: a pod's name survives a restart of its container, which then leads at once."""
    return environ.get("POD_NAME") or f"{socket.gethostname()}-{os.getpid()}"


def _convert(name: str, text: str) -> object:
    default = {field.name: field.default for field in fields(Settings)}[name]
    try:
        if isinstance(default, bool):
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        if isinstance(default, tuple):
            return tuple(part.strip() for part in text.split(",") if part.strip())
        if isinstance(default, int):
            return int(text)
        if isinstance(default, float):
            return float(text)
    except (KeyError, ValueError):
        kind = type(default).__name__
        raise SettingsError(f"{_flag(name)} (or {ENV_PREFIX}{name.upper()}): {text!r} is no {kind}") from None
    return text
