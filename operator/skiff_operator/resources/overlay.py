"""The user's `podTemplate`, merged over the operator's template the way strategic merge patches are.

Maps merge key by key, lists with named entries merge by name, other lists are replaced, and null removes a field.
Fields that the operator owns are not silently overridden: `check` refuses them and names the field to use instead.
"""

from typing import Any, Final

from skiff_operator.errors import InvalidSpec
from skiff_operator.resources import containers
from skiff_operator.resources.metadata import LABEL_REVISION
from skiff_runtime import contract

_MERGE_KEYS: Final = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "volumeMounts": "mountPath",
    "ports": "containerPort",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
}

_OWNED_POD_FIELDS: Final = {
    "restartPolicy": "remove it",
    "terminationGracePeriodSeconds": "use spec.drain.timeoutSeconds",
}
_OWNED_CONTAINER_FIELDS: Final = {
    "image": "use spec.runtime.image",
    "args": "use spec.runtime.args",
    "command": "use spec.runtime.args",
    "resources": "use spec.resources",
    "startupProbe": "use spec.startup.timeoutSeconds",
    "readinessProbe": "remove it",
    "livenessProbe": "remove it",
    "lifecycle": "use spec.drain.timeoutSeconds",
    "terminationMessagePath": "remove it",
    "terminationMessagePolicy": "remove it",
}
_OWNED_FIELDS: Final = {
    containers.RUNTIME: _OWNED_CONTAINER_FIELDS,
    containers.FETCH: {**_OWNED_CONTAINER_FIELDS, "resources": "use spec.model.fetch.resources"},
}
_OWNED_LABELS: Final = (
    contract.LABEL_NAME,
    contract.LABEL_INSTANCE,
    contract.LABEL_MANAGED_BY,
    contract.LABEL_SERVICE,
    contract.LABEL_ENGINE_TYPE,
    LABEL_REVISION,
)


def merge(base: Any, patch: Any) -> Any:
    """Merge `patch` over `base`; neither is modified."""
    if not isinstance(base, dict) or not isinstance(patch, dict):
        return patch
    merged = dict(base)
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        elif key in _MERGE_KEYS and isinstance(merged.get(key), list):
            merged[key] = _merge_list(merged[key], value, list_name=key)
        else:
            merged[key] = merge(merged.get(key), value)
    return merged


def check(patch: dict[str, Any], *, allow_host_path: bool) -> None:
    """Raise `InvalidSpec` when the overlay sets fields that the operator owns, or is not a pod template."""
    _only(patch, ("metadata", "spec"), "spec.podTemplate")
    metadata = _mapping(patch, "metadata", "spec.podTemplate.metadata")
    _only(metadata, ("labels", "annotations"), "spec.podTemplate.metadata")
    for label in _mapping(metadata, "labels", "spec.podTemplate.metadata.labels"):
        if label in _OWNED_LABELS:
            raise InvalidSpec(f"spec.podTemplate.metadata.labels: {label} is set by the operator; remove it")
    pod = _mapping(patch, "spec", "spec.podTemplate.spec")
    _refuse(pod, _OWNED_POD_FIELDS, "spec.podTemplate.spec")
    for group in ("containers", "initContainers", "volumes"):
        for entry in _named(pod, group):
            if entry["name"] in (containers.RUNTIME, containers.FETCH) and group != "volumes":
                _refuse(
                    entry, _OWNED_FIELDS[entry["name"]], f"spec.podTemplate.spec.{group}[{entry['name']}]"
                )
            if "hostPath" in entry and not allow_host_path:
                raise InvalidSpec(
                    f"spec.podTemplate.spec.volumes[{entry['name']}]: hostPath volumes are off; "
                    "use a claim, or start the operator with --allow-host-path"
                )


def _merge_list(base: list[Any], patch: Any, *, list_name: str) -> list[Any]:
    key = _MERGE_KEYS[list_name]
    if not isinstance(patch, list) or not all(_has_key(item, key) for item in patch):
        raise InvalidSpec(f"spec.podTemplate: {list_name} must be a list whose entries have a {key}")
    merged = list(base)
    index_by_key = {item.get(key): index for index, item in enumerate(merged)}
    for item in patch:
        if item[key] in index_by_key:
            index = index_by_key[item[key]]
            merged[index] = merge(merged[index], item)
        else:
            index_by_key[item[key]] = len(merged)
            merged.append(item)
    return merged


def _has_key(item: Any, key: str) -> bool:
    return isinstance(item, dict) and isinstance(item.get(key), str | int)


def _mapping(parent: dict[str, Any], key: str, where: str) -> dict[str, Any]:
    value = parent.get(key, {})
    if not isinstance(value, dict):
        raise InvalidSpec(f"{where}: must be a map, not {type(value).__name__}")
    return value


def _named(pod: dict[str, Any], group: str) -> list[dict[str, Any]]:
    entries = pod.get(group, [])
    if not isinstance(entries, list) or any(not isinstance(e, dict) or not e.get("name") for e in entries):
        raise InvalidSpec(f"spec.podTemplate.spec.{group}: must be a list whose entries have a name")
    return entries


def _only(patch: dict[str, Any], allowed: tuple[str, ...], where: str) -> None:
    for key in patch:
        if key not in allowed:
            raise InvalidSpec(f"{where}.{key}: not supported; only {' and '.join(allowed)} may be set")


def _refuse(patch: dict[str, Any], owned: dict[str, str], where: str) -> None:
    for key, advice in owned.items():
        if key in patch:
            raise InvalidSpec(f"{where}.{key}: is set by the operator; {advice}")
