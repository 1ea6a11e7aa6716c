"""The operator installation of a cluster: made by the demo or the end-to-end tests, or by somebody else.

The demo and the tests label the operator's namespace before they install anything. They neither replace nor remove an
installation without that label.
"""

from __future__ import annotations

from typing import Final

from commands import ClusterError, output

OPERATOR_NAMESPACE: Final = "skiff-system"
CRD: Final = "inferenceservices.serving.skiff.dev"
MARK: Final = "serving.skiff.dev/made-by=skiff-demo"


class OperatorInstallation:
    """The operator installation of one cluster."""

    def __init__(self, kubectl: str, kubeconfig: str) -> None:
        self._base = [kubectl, "--kubeconfig", kubeconfig]

    @property
    def ours(self) -> bool:
        """Return whether the installed release came from this clone."""
        return bool(
            self._names("namespaces", "-l", MARK, "--field-selector", f"metadata.name={OPERATOR_NAMESPACE}")
        )

    def claim(self) -> None:
        """Label the namespace as ours. Raises ClusterError when the cluster has an operator that is not ours."""
        if self.ours:
            return
        if self._names("crds", "--field-selector", f"metadata.name={CRD}"):
            raise ClusterError(
                f"this cluster has the CustomResourceDefinition {CRD}, which was not installed from here: it would be "
                "replaced, and removed with all InferenceServices afterwards. Use another cluster; or, if it is not "
                f"needed, remove it: kubectl delete crd {CRD}"
            )
        if not self._names("namespaces", "--field-selector", f"metadata.name={OPERATOR_NAMESPACE}"):
            output([*self._base, "create", "namespace", OPERATOR_NAMESPACE])
        output([*self._base, "label", "namespace", OPERATOR_NAMESPACE, MARK])

    def remove(self) -> None:
        """Delete our objects that outlive the release: the CustomResourceDefinition and the namespace."""
        for words in (("crd", CRD), ("namespace", OPERATOR_NAMESPACE)):
            output([*self._base, "delete", "--ignore-not-found", *words], timeout_seconds=180)

    def _names(self, *words: str) -> list[str]:
        return output([*self._base, "get", *words, "--output", "name"]).split()
