"""The treatment of False, 0 and empty values by a real API server, on which the detection of drift relies."""

import copy
from collections.abc import Iterator
from typing import Any

from apiserver import APPLY, ApiServer, Refused
from services import hub, raw

from skiff_operator import plan, spec
from skiff_operator.drift import covers
from skiff_operator.settings import Settings

TEMPLATE = {
    "metadata": {"labels": {"empty": ""}, "annotations": {"empty": ""}},
    "spec": {
        "hostNetwork": False,
        "hostPID": False,
        "shareProcessNamespace": False,
        "setHostnameAsFQDN": False,
        "hostname": "",
        "priorityClassName": "",
        "nodeSelector": {"node-role.kubernetes.io/gpu": ""},
        "imagePullSecrets": [],
        "hostAliases": [],
        "affinity": {"nodeAffinity": {}, "podAffinity": {}, "podAntiAffinity": {}},
        "hostUsers": False,
        "securityContext": {
            "runAsNonRoot": False,
            "runAsUser": 0,
            "runAsGroup": 0,
            "fsGroup": 0,
            "supplementalGroups": [],
        },
        "tolerations": [{"key": "", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 0}],
        "containers": [
            {
                "name": "runtime",
                "stdin": False,
                "workingDir": "",
                "env": [{"name": "EMPTY", "value": ""}],
                "securityContext": {"privileged": False, "readOnlyRootFilesystem": False, "capabilities": {}},
                "volumeMounts": [
                    {"name": "config", "mountPath": "/etc/model", "readOnly": False, "subPath": ""}
                ],
            }
        ],
        "volumes": [
            {"name": "config", "configMap": {"name": "model", "optional": False, "items": []}},
            {"name": "space", "emptyDir": {"medium": "", "sizeLimit": "0"}},
        ],
    },
}
SPECS: tuple[dict[str, Any], ...] = (
    {"podTemplate": TEMPLATE, "replicas": 0},
    {"model": hub(), "cache": {"size": "1Gi"}, "replicas": 2},
    {
        "apiKeysSecretRef": {"name": "keys"},
        "networkPolicy": {
            "from": [{"podSelector": {}}, {"podSelector": {}, "namespaceSelector": {}}],
            "metricsFrom": [{"namespaceSelector": {"matchLabels": {"empty": ""}}}],
            "egress": [{}, {"to": [{"ipBlock": {"cidr": "10.0.0.0/8", "except": []}}]}],
        },
    },
    {"resources": {"requests": {"cpu": 0, "memory": "1024Mi"}}, "parallelism": {"tensor": 2}},
)


def zeros(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all False, 0 and empty values."""
    if isinstance(value, dict | list) and value:
        for step, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from zeros(inner, (*path, step))
    elif not value:
        yield path


def lookup(obj: Any, path: tuple[Any, ...]) -> Any:
    """The value at a path; None where there is none."""
    for step in path:
        if isinstance(obj, dict):
            obj = obj.get(step)
        elif isinstance(obj, list) and step < len(obj):
            obj = obj[step]
        else:
            return None
    return obj


def without(obj: Any, path: tuple[Any, ...]) -> Any:
    """A copy that lacks the value at a path."""
    changed = copy.deepcopy(obj)
    parent = lookup(changed, path[:-1])
    del parent[path[-1]]
    return changed


def desired(api: ApiServer, number: int) -> list[tuple[str, dict[str, Any]]]:
    """The objects of one of `SPECS`, each with the path under which it is written."""
    name = f"llama{number}"
    body = raw(name, namespace=api.namespace, **SPECS[number])
    built = plan.objects(spec.parse(body), Settings(allow_privileged_pods=True))
    return [(kind.path(api.namespace, child), obj) for (kind, child), obj in built.items()]


def test_what_is_applied_is_found_again_and_its_loss_is_drift(api: ApiServer) -> None:
    """A zero that the API server stored is removed by someone else; unless it comes back, that is drift."""
    removed = set()
    for number in range(len(SPECS)):
        for path, wanted in desired(api, number):
            live = api.request("PATCH", f"{path}?fieldManager=skiff-operator", wanted, kind=APPLY)
            assert covers(wanted, live), path
            for zero in zeros(wanted):
                if lookup(live, zero) is None:
                    continue
                try:
                    edited = api.request("PUT", f"{path}?dryRun=All", without(live, zero))
                except Refused:  # the field may not be missing, so it cannot be lost
                    edited = without(live, zero)
                if lookup(edited, zero) != lookup(live, zero):
                    removed.add(zero[-1])
                    assert not covers(wanted, edited), f"{path}: {zero}"
    assert {"automountServiceAccountToken", "allowPrivilegeEscalation", "empty", "optional"} <= removed
