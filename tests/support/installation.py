"""The operator as the chart installs it: under its ServiceAccount, with its roles and its Deployment's environment."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import yaml
from apiserver import APPLY, ApiServer
from helm import ROOT, Helm
from operator_process import OperatorProcess, eventually, token_kubeconfig

RIGHTS: Final = "/apis/rbac.authorization.k8s.io/v1"
ADMISSION: Final = "/apis/admissionregistration.k8s.io/v1"
PATHS: Final = {
    "Namespace": "/api/v1/namespaces",
    "ServiceAccount": "/api/v1/namespaces/{namespace}/serviceaccounts",
    "ClusterRole": f"{RIGHTS}/clusterroles",
    "ClusterRoleBinding": f"{RIGHTS}/clusterrolebindings",
    "Role": f"{RIGHTS}/namespaces/{{namespace}}/roles",
    "ValidatingAdmissionPolicy": f"{ADMISSION}/validatingadmissionpolicies",
    "ValidatingAdmissionPolicyBinding": f"{ADMISSION}/validatingadmissionpolicybindings",
    "RoleBinding": f"{RIGHTS}/namespaces/{{namespace}}/rolebindings",
}
"""The kinds that an operator outside of the cluster needs of its installation."""


MANIFESTS: Final = ("namespace", "service-account", "rbac", "deployment")


def raw_manifests() -> list[Any]:
    """Return the operator's objects of `kubectl apply -k manifests`: an operator of all namespaces."""
    texts = [(ROOT / f"manifests/operator/{name}.yaml").read_text() for name in MANIFESTS]
    return [body for text in texts for body in yaml.safe_load_all(text)]


class Installation:
    """A rendered chart, or the raw manifests, on a test API server.

    A verb that the code uses and the roles lack fails whatever test needs it.
    """

    def __init__(self, server: ApiServer, kubeconfig: Path, bodies: Sequence[Any]) -> None:
        self._server, self._kubeconfig, self._bodies = server, kubeconfig, bodies
        (self._deployment,) = (body for body in bodies if body["kind"] == "Deployment")
        self.namespace: str = self._deployment["metadata"]["namespace"]

    def apply(self) -> None:
        """Make the ServiceAccount and its roles; where helm has installed the chart, they exist already."""
        for body in self._bodies:
            if body["kind"] in PATHS:
                meta = body["metadata"]
                path = PATHS[body["kind"]].format(namespace=meta.get("namespace", ""))
                query = "fieldManager=tests&force=true"
                self._server.request("PATCH", f"{path}/{meta['name']}?{query}", body, kind=APPLY)

    def kubeconfig(self, path: Path) -> Path:
        """Write a kubeconfig with a token of the operator's ServiceAccount to `path`, once its roles are in force."""
        account = self._deployment["spec"]["template"]["spec"]["serviceAccountName"]
        api = self._server.in_namespace(self.namespace)
        path.write_text(token_kubeconfig(api, account, self._kubeconfig))
        eventually(lambda: self._may_lead(api, account), "the operator's roles are in force")
        return path

    def operator(self, folder: Path, identity: str, *flags: str) -> OperatorProcess:
        """Return an operator that is not started yet; its log and its kubeconfig lie in `folder`."""
        container = self._deployment["spec"]["template"]["spec"]["containers"][0]
        environment = {
            each["name"]: each["value"] if "value" in each else self._field(each, identity)
            for each in container["env"]
        }
        arguments = [*container.get("args", []), *flags]
        kubeconfig = self.kubeconfig(folder / f"{identity}.kubeconfig")
        return OperatorProcess(kubeconfig, folder / f"{identity}.log", *arguments, environment=environment)

    def _field(self, variable: Any, identity: str) -> str:
        """Return what the kubelet would set a variable to that names a field of the pod."""
        fields = {"metadata.name": identity, "metadata.namespace": self.namespace}
        return fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]

    def _may_lead(self, api: ApiServer, account: str) -> bool:
        attributes = {"namespace": self.namespace, "verb": "create", "group": "coordination.k8s.io"}
        user = f"system:serviceaccount:{self.namespace}:{account}"
        spec = {"user": user, "resourceAttributes": {**attributes, "resource": "leases"}}
        answer = api.request("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", {"spec": spec})
        return bool(answer["status"]["allowed"])


@contextlib.contextmanager
def running_operator(
    server: ApiServer, kubeconfig: Path, folder: Path, name: str, *values: str, namespace: str
) -> Iterator[OperatorProcess]:
    """Run an operator of one namespace, under the rights of a chart with these values, until the end of the block."""
    chart = Helm().render(f"watchNamespaces={{{namespace}}}", *values, namespace=namespace)
    installed = Installation(server, kubeconfig, chart)
    installed.apply()
    process = installed.operator(folder, name, "--status-delay-seconds", "0.1")
    process.start()
    try:
        yield process
    finally:
        process.end()
