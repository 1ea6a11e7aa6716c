"""The restricted level of the Pod Security Standards, checked on the merged pod template.

An author of InferenceServices sets part of a pod through `podTemplate`, and the pod is created with the operator's
rights instead of the author's. So the template may not violate the restricted level (its rules as of Kubernetes 1.36)
nor use another ServiceAccount or an API token. Nothing is relaxed for `hostUsers: false` or Windows, where the
standard allows more. Host paths have a switch of their own (`overlay.check`).
"""

from collections.abc import Iterator
from typing import Any, Final

from skiff_operator.errors import InvalidSpec
from skiff_operator.resources import containers

_WHERE: Final = "spec.podTemplate.spec"
_CONTAINER_GROUPS: Final = ("initContainers", "containers", "ephemeralContainers")

_POD_FIELDS: Final = {
    "hostNetwork": (False,),
    "hostPID": (False,),
    "hostIPC": (False,),
}
_PROFILES: Final = ("RuntimeDefault", "Localhost")
_SECURITY_FIELDS: Final[dict[str, tuple[Any, ...]]] = {
    "runAsNonRoot": (True,),
    "seccompProfile.type": _PROFILES,
    "appArmorProfile.type": _PROFILES,
    "seLinuxOptions.type": ("", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"),
    "seLinuxOptions.user": ("",),
    "seLinuxOptions.role": ("",),
    "windowsOptions.hostProcess": (False,),
}
"""Fields of the security contexts of pods and containers, with their allowed values."""

_CONTAINER_FIELDS: Final[dict[str, tuple[Any, ...]]] = {
    **_SECURITY_FIELDS,
    "privileged": (False,),
    "allowPrivilegeEscalation": (False,),
    "procMount": ("Default",),
}
_INHERITED: Final = ("runAsNonRoot", "seccompProfile.type")
"""Fields that must be set, on the container or on the pod."""

_SYSCTLS: Final = (
    "kernel.shm_rmid_forced",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.ping_group_range",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes",
    "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_rmem",
    "net.ipv4.tcp_syncookies",
    "net.ipv4.tcp_wmem",
)
_VOLUME_TYPES: Final = (
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "image",
    "persistentVolumeClaim",
    "projected",
    "secret",
)
_HANDLERS: Final = (
    "livenessProbe",
    "readinessProbe",
    "startupProbe",
    "lifecycle.postStart",
    "lifecycle.preStop",
)
_CREDENTIALS: Final = ("serviceAccountToken", "podCertificate")
_APPARMOR_ANNOTATION: Final = "container.apparmor.security.beta.kubernetes.io/"


def complete(pod: dict[str, Any]) -> dict[str, Any]:
    """Fill in settings that the level requires and that containers of the overlay omit."""
    completed = dict(pod)
    for group in _CONTAINER_GROUPS:
        if group in pod:
            entries = _entries(pod, group, _WHERE)
            completed[group] = [_complete(each, where) for where, each in entries]
    return completed


def check(template: dict[str, Any], *, account: str) -> None:
    """Raise `InvalidSpec` for the first field that violates the level; pods run as `account`, without a token."""
    pod = template["spec"]
    _check_values(pod, _POD_FIELDS, _WHERE)
    security = _mapping(pod, "securityContext", _WHERE)
    where = f"{_WHERE}.securityContext"
    _check_values(security, _SECURITY_FIELDS, where)
    _check_user(security, where)
    for path, sysctl in _entries(security, "sysctls", where):
        if sysctl.get("name") not in _SYSCTLS:
            raise _refusal(path, f"must be one of {', '.join(_SYSCTLS)}")
    for group in _CONTAINER_GROUPS:
        for path, container in _entries(pod, group, _WHERE):
            _check_container(container, security, path)
    for path, volume in _entries(pod, "volumes", _WHERE):
        _check_volume(volume, path)
    _check_identity(pod, account)
    for name, profile in _mapping(template["metadata"], "annotations", "spec.podTemplate.metadata").items():
        allowed = profile in ("", "runtime/default") or str(profile).startswith("localhost/")
        if name.startswith(_APPARMOR_ANNOTATION) and not allowed:
            raise _refusal(f"spec.podTemplate.metadata.annotations[{name}]", "must be runtime/default")


def _complete(container: dict[str, Any], where: str) -> dict[str, Any]:
    if container.get("name") in (containers.RUNTIME, containers.FETCH):
        return container
    given = _mapping(container, "securityContext", where)
    capabilities = _mapping(given, "capabilities", f"{where}.securityContext")
    security = {
        **_over({"allowPrivilegeEscalation": False}, given),
        "capabilities": _over({"drop": ["ALL"]}, capabilities),
    }
    return {**container, "securityContext": security}


def _over(defaults: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    return defaults | {key: value for key, value in given.items() if value is not None}


def _check_container(container: dict[str, Any], pod_security: dict[str, Any], where: str) -> None:
    path = f"{where}.securityContext"
    security = _mapping(container, "securityContext", where)
    _check_values(security, _CONTAINER_FIELDS, path)
    _check_user(security, path)
    if security.get("allowPrivilegeEscalation") is None:
        raise _refusal(f"{path}.allowPrivilegeEscalation", "must be false")
    for field in _INHERITED:
        if _find(security, field, path) is None and _find(pod_security, field, where) is None:
            raise _refusal(
                f"{path}.{field}", f"must be {_words(_SECURITY_FIELDS[field])}, here or for the pod"
            )
    capabilities = _mapping(security, "capabilities", path)
    if "ALL" not in _list(capabilities, "drop", f"{path}.capabilities"):
        raise _refusal(f"{path}.capabilities.drop", "must contain ALL")
    if any(name != "NET_BIND_SERVICE" for name in _list(capabilities, "add", f"{path}.capabilities")):
        raise _refusal(f"{path}.capabilities.add", "may contain NET_BIND_SERVICE only")
    for port_place, port in _entries(container, "ports", where):
        _check_values(port, {"hostPort": (0,)}, port_place)
    for handler in _HANDLERS:
        for action in ("httpGet", "tcpSocket"):
            _check_values(container, {f"{handler}.{action}.host": ("",)}, where)


def _check_volume(volume: dict[str, Any], where: str) -> None:
    for name, source in volume.items():
        if source is not None and name not in ("name", "hostPath", *_VOLUME_TYPES):
            raise _refusal(f"{where}.{name}", f"must be of another type: {', '.join(_VOLUME_TYPES)}")
    projected = _mapping(volume, "projected", where)
    for path, source in _entries(projected, "sources", f"{where}.projected"):
        for credential in _CREDENTIALS:
            if source.get(credential) is not None:
                raise _denial(f"{path}.{credential}", "pods have no credentials of the API server")


def _check_identity(pod: dict[str, Any], account: str) -> None:
    for field in ("serviceAccountName", "serviceAccount"):
        name = pod.get(field)
        if name != account and not (name is None and field == "serviceAccount"):
            raise _denial(
                f"{_WHERE}.{field}", f"pods run as {account}, the InferenceService's own ServiceAccount"
            )
    if pod.get("automountServiceAccountToken") is not False:
        raise _denial(f"{_WHERE}.automountServiceAccountToken", "pods have no credentials of the API server")


def _check_values(parent: dict[str, Any], fields: dict[str, tuple[Any, ...]], where: str) -> None:
    """Raise `InvalidSpec` with the path of a field that is set to a disallowed value."""
    for path, allowed in fields.items():
        value = _find(parent, path, where)
        if value is not None and value not in allowed:
            raise _refusal(f"{where}.{path}", f"must be {_words(allowed)}")


def _check_user(security: dict[str, Any], where: str) -> None:
    if security.get("runAsUser") == 0:
        raise _refusal(f"{where}.runAsUser", "must not be 0")


def _find(parent: dict[str, Any], path: str, where: str) -> Any:
    *groups, last = path.split(".")
    for group in groups:
        parent, where = _mapping(parent, group, where), f"{where}.{group}"
    return parent.get(last)


def _mapping(parent: dict[str, Any], key: str, where: str) -> dict[str, Any]:
    value = parent.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidSpec(f"{where}.{key}: must be a map, not {type(value).__name__}")
    return value


def _list(parent: dict[str, Any], key: str, where: str) -> list[Any]:
    value = parent.get(key)
    if value is None:
        return []
    if not isinstance(value, list):
        raise InvalidSpec(f"{where}.{key}: must be a list, not {type(value).__name__}")
    return value


def _entries(parent: dict[str, Any], key: str, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the entries of a list with their paths: by name if present, else by index."""
    for index, entry in enumerate(_list(parent, key, where)):
        if not isinstance(entry, dict):
            raise InvalidSpec(f"{where}.{key}[{index}]: must be a map, not {type(entry).__name__}")
        yield f"{where}.{key}[{entry.get('name', index)}]", entry


def _words(allowed: tuple[Any, ...]) -> str:
    words = ["true" if v is True else "false" if v is False else str(v) or "empty" for v in allowed]
    return " or ".join(words)


def _refusal(where: str, rule: str) -> InvalidSpec:
    return _denial(where, f"{rule} at the restricted Pod Security level")


def _denial(where: str, rule: str) -> InvalidSpec:
    return InvalidSpec(f"{where}: {rule}; change it, or start the operator with --allow-privileged-pods")
