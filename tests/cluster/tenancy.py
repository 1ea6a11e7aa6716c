"""Whose the operator of a cluster is: what the demo and the end-to-end tests installed, or what somebody relies on.

Both mark their namespace before they install anything. They neither replace nor remove an operator without that mark.
"""

from __future__ import annotations

from typing import Final

from commands import ClusterError, output

OPERATOR_NAMESPACE: Final = "skiff-system"
CRD: Final = "inferenceservices.serving.skiff.dev"
MARK: Final = "serving.skiff.dev/made-by=skiff-demo"


class Tenancy:
    """The operator's place in one cluster."""

    def __init__(self, kubectl: str, kubeconfig: str) -> None:
        self._base = [kubectl, "--kubeconfig", kubeconfig]

    @property
    def ours(self) -> bool:
        """Return whether the installed release came from this clone."""
        return bool(
            self._names("namespaces", "-l", MARK, "--field-selector", f"metadata.name={OPERATOR_NAMESPACE}")
        )

    def claim(self) -> None:
        """Make the namespace ours. Raises ClusterError where the cluster has an operator already that is not."""
        if self.ours:
            return
        if self._names("crds", "--field-selector", f"metadata.name={CRD}"):
            raise ClusterError(
                f"this cluster has the CustomResourceDefinition {CRD}, which was not installed from here: it would be "
                "replaced, and removed with all InferenceServices afterwards. Use another cluster; or, if it is not needed "
                f"it, remove it: kubectl delete crd {CRD}"
            )
        if not self._names("namespaces", "--field-selector", f"metadata.name={OPERATOR_NAMESPACE}"):
            output([*self._base, "create", "namespace", OPERATOR_NAMESPACE])
        output([*self._base, "label", "namespace", OPERATOR_NAMESPACE, MARK])

    def remove(self) -> None:
        """Delete what was ours and outlives the release: the CustomResourceDefinition and the namespace."""
        for words in (("crd", CRD), ("namespace", OPERATOR_NAMESPACE)):
            output([*self._base, "delete", "--ignore-not-found", *words], timeout_seconds=180)

    def _names(self, *words: str) -> list[str]:
        return output([*self._base, "get", *words, "--output", "name"]).split()
