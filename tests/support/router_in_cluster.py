"""The router as the chart installs it in the test's cluster."""

from typing import Final

from helm import CHART, RELEASE, Helm
from kube import Kube

ROUTER: Final = "skiff-router"
URL: Final = "http://skiff-router.skiff-system"
_SELECTOR: Final = f"app.kubernetes.io/name={ROUTER}"


def upgrade(helm: Helm, operator: Kube, *values: str) -> None:
    """Upgrade the release with these values beside its own, and wait until the routers are those of the new values."""
    release = [RELEASE, str(CHART), "--namespace", operator.namespace, "--reuse-values"]
    sets = [word for value in values for word in ("--set-json", value)]
    helm.run("upgrade", *release, "--wait", "--timeout", "4m", *sets)
    if operator.get("deployment", ROUTER) is not None:
        operator.run("rollout", "status", f"deployment/{ROUTER}", "--timeout=180s", timeout_seconds=210)


def routers(operator: Kube) -> dict[str, str]:
    """Return the addresses of the routers' pods that are ready and do not end, by their names."""
    found = {}
    for pod in operator.list("pods", _SELECTOR):
        ready = [each for each in pod.get("status", {}).get("conditions", []) if each["type"] == "Ready"]
        if ready and ready[0]["status"] == "True" and "deletionTimestamp" not in pod["metadata"]:
            found[pod["metadata"]["name"]] = f"http://{pod['status']['podIP']}:8080"
    return found
