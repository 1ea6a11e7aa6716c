"""The check of the merged pod template agrees with Pod Security admission at the restricted level, case by case."""

from typing import Any

import pytest
from apiserver import ApiServer, Refused
from operator_process import eventually
from services import service

from skiff_operator.errors import InvalidSpec
from skiff_operator.resources import pod
from skiff_operator.settings import Settings
from skiff_operator.spec import InferenceService

ALLOWING = Settings(allow_privileged_pods=True)
ANNOTATION = "container.apparmor.security.beta.kubernetes.io/runtime"
PROBE = {"periodSeconds": 5, "tcpSocket": {"port": 1}}


@pytest.fixture(scope="module")
def restricted(server: ApiServer) -> ApiServer:
    """A namespace under the restricted level with the ServiceAccount of the pods."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    server.request("POST", "/api/v1/namespaces", {"metadata": {"name": "restricted-pods", "labels": labels}})
    api = server.in_namespace("restricted-pods")
    api.create("serviceaccounts", {"metadata": {"name": "llama"}})
    eventually(lambda: api.find("serviceaccounts", "default"), "the namespace's default account")
    return api


def sidecar(**fields: Any) -> dict[str, Any]:
    """A pod spec with one container more."""
    return {"containers": [{"name": "agent", "image": "agent:1", **fields}]}


def secured(**security: Any) -> dict[str, Any]:
    """A pod spec with one container more, which meets the level but for `security`."""
    base = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    return sidecar(securityContext=base | security)


def runtime(**fields: Any) -> dict[str, Any]:
    """A pod spec that changes the serving container."""
    return {"containers": [{"name": "runtime", **fields}]}


def whole(**security: Any) -> dict[str, Any]:
    """A pod spec that changes the pod's security context."""
    return {"securityContext": security}


def volume(**source: Any) -> dict[str, Any]:
    """A pod spec with one volume more."""
    return {"volumes": [{"name": "more", **source}]}


SOUND: list[dict[str, Any]] = [
    {},
    sidecar(),
    sidecar(securityContext=None),
    secured(),
    secured(capabilities={"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]}),
    secured(capabilities={"add": ["NET_BIND_SERVICE"]}),
    secured(privileged=False, procMount="Default", runAsUser=1000, readOnlyRootFilesystem=False),
    secured(seccompProfile={"type": "Localhost", "localhostProfile": "a.json"}),
    secured(appArmorProfile={"type": "RuntimeDefault"}),
    secured(seLinuxOptions={"type": "container_t", "level": "s0"}),
    {"initContainers": [{"name": "prepare", "image": "agent:1"}]},
    {"initContainers": [{"name": "prepare", "image": "agent:1", "restartPolicy": "Always"}]},
    sidecar(ports=[{"containerPort": 9}]),
    sidecar(livenessProbe=PROBE, lifecycle={"postStart": {"exec": {"command": ["true"]}}}),
    sidecar(envFrom=[{"secretRef": {"name": "keys"}}]),
    runtime(securityContext={"runAsUser": 1000, "runAsGroup": 0}),
    runtime(securityContext={"readOnlyRootFilesystem": False}),
    whole(fsGroup=0, supplementalGroups=[0], runAsUser=7),
    whole(sysctls=[{"name": "net.ipv4.tcp_wmem", "value": "1 2 3"}]),
    whole(runAsUser=None, fsGroup=None),
    {"hostNetwork": False, "hostPID": None, "hostUsers": True, "shareProcessNamespace": True},
    {"hostUsers": False},
    {"nodeName": "n", "schedulerName": "s", "priorityClassName": None, "runtimeClassName": None},
    {"hostAliases": [{"ip": "10.0.0.1", "hostnames": ["a"]}], "dnsPolicy": "Default"},
    {"serviceAccountName": "llama", "serviceAccount": "llama", "automountServiceAccountToken": False},
    volume(csi={"driver": "secrets-store.csi.k8s.io"}),
    volume(secret={"secretName": "keys"}),
    volume(configMap={"name": "settings"}),
    volume(emptyDir={"medium": "Memory"}),
    volume(image={"reference": "models:1"}),
    volume(projected={"sources": [{"secret": {"name": "keys"}}, {"configMap": {"name": "settings"}}]}),
    volume(persistentVolumeClaim={"claimName": "kernels"}),
    volume(nfs=None, downwardAPI={"items": []}),
    {"volumes": [{"name": "tmp", "emptyDir": {"sizeLimit": "40Gi"}}]},
]

UNSOUND: list[tuple[dict[str, Any], str]] = [
    ({"hostNetwork": True}, "spec.hostNetwork: must be false"),
    ({"hostPID": True}, "spec.hostPID"),
    ({"hostIPC": True}, "spec.hostIPC"),
    (secured(privileged=True, allowPrivilegeEscalation=None), "containers.agent..securityContext.privileged"),
    (secured(allowPrivilegeEscalation=True), "allowPrivilegeEscalation"),
    (secured(capabilities={"drop": ["ALL"], "add": ["NET_ADMIN"]}), "capabilities.add: may contain NET_BIND"),
    (secured(capabilities={"drop": ["NET_RAW"]}), "capabilities.drop: must contain ALL"),
    (secured(runAsUser=0), "agent..securityContext.runAsUser"),
    (secured(runAsNonRoot=False), "runAsNonRoot: must be true"),
    (secured(procMount="Unmasked") | {"hostUsers": False}, "procMount: must be Default"),
    (
        secured(seccompProfile={"type": "Unconfined"}),
        "seccompProfile.type: must be RuntimeDefault or Localhost",
    ),
    (secured(appArmorProfile={"type": "Unconfined"}), "appArmorProfile.type"),
    (secured(seLinuxOptions={"type": "spc_t"}), "seLinuxOptions.type"),
    (secured(seLinuxOptions={"user": "system_u"}), "seLinuxOptions.user"),
    (secured(seLinuxOptions={"role": "system_r"}), "seLinuxOptions.role"),
    (sidecar(ports=[{"containerPort": 9, "hostPort": 9}]), "ports.0..hostPort"),
    (sidecar(livenessProbe={"tcpSocket": {"port": 1, "host": "h"}}), "livenessProbe.tcpSocket.host"),
    (sidecar(readinessProbe={"httpGet": {"port": 1, "host": "h"}}), "readinessProbe.httpGet.host"),
    (sidecar(startupProbe={"tcpSocket": {"port": 1, "host": "h"}}), "startupProbe.tcpSocket.host"),
    (sidecar(lifecycle={"preStop": {"httpGet": {"port": 1, "host": "h"}}}), "lifecycle.preStop.httpGet.host"),
    (sidecar(lifecycle={"postStart": {"tcpSocket": {"port": 1, "host": "h"}}}), "lifecycle.postStart.tcp"),
    (
        {"initContainers": [{"name": "i", "image": "i", "securityContext": {"runAsUser": 0}}]},
        "initContainers.i.",
    ),
    (
        runtime(securityContext={"capabilities": {"add": ["SYS_PTRACE"]}}),
        "containers.runtime..*capabilities.add",
    ),
    (runtime(securityContext={"capabilities": None}), "capabilities.drop: must contain ALL"),
    (runtime(securityContext={"allowPrivilegeEscalation": None}), "allowPrivilegeEscalation: must be false"),
    (runtime(securityContext=None), "containers.runtime..securityContext"),
    (runtime(ports=[{"containerPort": 8000, "hostPort": 80}]), "hostPort: must be 0"),
    ({"securityContext": None}, "runAsNonRoot: must be true, here or for the pod"),
    (whole(runAsUser=0), "spec.securityContext.runAsUser"),
    (whole(runAsNonRoot=False), "spec.securityContext.runAsNonRoot"),
    (whole(seccompProfile=None), "seccompProfile.type"),
    (whole(seccompProfile={"type": "Unconfined"}), "spec.securityContext.seccompProfile.type"),
    (whole(appArmorProfile={"type": "Unconfined"}), "spec.securityContext.appArmorProfile.type"),
    (whole(seLinuxOptions={"type": "spc_t"}), "spec.securityContext.seLinuxOptions.type"),
    (whole(sysctls=[{"name": "kernel.msgmax", "value": "1"}]), "sysctls.kernel.msgmax"),
    (whole(windowsOptions={"hostProcess": True}), "windowsOptions.hostProcess"),
    (volume(nfs={"server": "s", "path": "/"}), "volumes.more..nfs"),
    (
        volume(iscsi={"targetPortal": "p", "iqn": "iqn.2001-04.com.example:s", "lun": 0}),
        "volumes.more..iscsi",
    ),
]


def verdict(api: ApiServer, template: dict[str, Any]) -> str:
    """Create a pod of this template as a dry run; the refusal, or an empty text."""
    body = {"metadata": {"name": "pod", **template["metadata"]}, "spec": template["spec"]}
    try:
        api.request("POST", f"{api.path('pods')}?dryRun=All", body)
    except Refused as refusal:
        return refusal.message
    return ""


def overlaid(spec: dict[str, Any]) -> InferenceService:
    """A service on the CPU with an overlay."""
    return service(runtime={"device": "cpu"}, podTemplate={"spec": spec})


@pytest.mark.parametrize("spec", SOUND)
def test_what_the_level_allows_is_built_and_admitted(restricted: ApiServer, spec: dict[str, Any]) -> None:
    assert verdict(restricted, pod.build(overlaid(spec), Settings())) == ""


@pytest.mark.parametrize(("spec", "field"), UNSOUND)
def test_what_the_level_forbids_is_refused_by_both(
    restricted: ApiServer, spec: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidSpec, match=f"{field}.*--allow-privileged-pods"):
        pod.build(overlaid(spec), Settings())
    said = verdict(restricted, pod.build(overlaid(spec), ALLOWING))
    assert "violates PodSecurity" in said or "hostProcess" in said


@pytest.mark.parametrize(
    ("annotations", "allowed"),
    [({ANNOTATION: "unconfined"}, False), ({ANNOTATION: "runtime/default"}, True), ({"team": "a"}, True)],
)
def test_annotations_of_apparmor_are_checked(
    restricted: ApiServer, annotations: dict[str, str], allowed: bool
) -> None:
    changed = service(runtime={"device": "cpu"}, podTemplate={"metadata": {"annotations": annotations}})
    assert ("violates PodSecurity" not in verdict(restricted, pod.build(changed, ALLOWING))) == allowed
    if allowed:
        pod.build(changed, Settings())
        return
    with pytest.raises(InvalidSpec, match=r"apparmor.*--allow-privileged-pods"):
        pod.build(changed, Settings())


TOKEN = {"sources": [{"serviceAccountToken": {"path": "token"}}]}
CERTIFICATE = {"signerName": "kubernetes.io/kube-apiserver-client", "keyType": "ED25519", "keyPath": "k"}
STRICTER: list[tuple[dict[str, Any], str]] = [
    ({"serviceAccountName": "default"}, "serviceAccountName: pods run as llama"),
    ({"serviceAccountName": None}, "serviceAccountName: pods run as llama"),
    ({"serviceAccountName": None, "serviceAccount": "default"}, "serviceAccountName: pods run as llama"),
    ({"automountServiceAccountToken": True}, "automountServiceAccountToken: pods have no credentials"),
    ({"automountServiceAccountToken": None}, "automountServiceAccountToken: pods have no credentials"),
    (volume(projected=TOKEN), "serviceAccountToken: pods have no credentials"),
    (whole(runAsNonRoot=False) | {"hostUsers": False}, "runAsNonRoot"),
]


@pytest.mark.parametrize(("spec", "field"), STRICTER)
def test_accounts_and_tokens_are_refused_though_the_level_knows_nothing_of_them(
    restricted: ApiServer, spec: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidSpec, match=f"{field}.*--allow-privileged-pods"):
        pod.build(overlaid(spec), Settings())
    assert verdict(restricted, pod.build(overlaid(spec), ALLOWING)) == ""


def test_certificates_of_the_pods_account_are_refused() -> None:
    spec = volume(projected={"sources": [{"podCertificate": CERTIFICATE}]})
    with pytest.raises(InvalidSpec, match="podCertificate: pods have no credentials"):
        pod.build(overlaid(spec), Settings())


def test_with_the_switch_the_users_containers_stay_as_they_are() -> None:
    built = pod.build(overlaid(sidecar()), ALLOWING)
    assert built["spec"]["containers"][1] == {"name": "agent", "image": "agent:1"}


@pytest.mark.parametrize(
    "spec",
    [
        whole(sysctls={}),
        whole(seccompProfile="a"),
        whole(sysctls=["a"]),
        sidecar(securityContext=[]),
        sidecar(securityContext={"capabilities": []}),
        sidecar(securityContext={"capabilities": {"drop": "ALL"}}),
        sidecar(ports={}),
        sidecar(livenessProbe="a"),
        volume(projected=[]),
        {"securityContext": "a"},
    ],
)
def test_values_of_another_shape_are_refused_by_name(spec: dict[str, Any]) -> None:
    with pytest.raises(InvalidSpec, match=r"spec\.podTemplate\.spec\..*must be a (map|list)"):
        pod.build(overlaid(spec), Settings())
