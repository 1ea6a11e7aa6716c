"""The fake hub as a pod of a cluster, with the demo model as skiff/demo."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kube import Kube, tool

MODEL: Final = "skiff/demo"
PORT: Final = 8900
_STAND_IN: Final = {
    name: (Path(__file__).parent / name).read_text() for name in ("fake_hub.py", "fake_source.py")
}
_START: Final = """
set -e
mkdir -p /tmp/models/skiff
ln -s "$(python3 -c 'from skiff_runtime import demo; print(demo.DIRECTORY)')" /tmp/models/skiff/demo
exec python3 /stand-in/fake_hub.py --directory /tmp/models --host 0.0.0.0 --port 8900
"""
_COUNT: Final = (
    "import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:8900/deliveries').read().decode())"
)


@contextmanager
def running_hub(kube: Kube) -> Iterator[str]:
    """Run the hub and yield its URL; its pod, and with it the count of downloads, is gone afterwards.

    The Service is headless, for the hub sends clients on to a second port.
    """
    kube.apply(
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "hub"},
            "data": _STAND_IN,
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "hub"},
            "spec": {"clusterIP": "None", "selector": {"app": "hub"}, "ports": [{"port": PORT}]},
        },
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "hub", "labels": {"app": "hub"}},
            "spec": {
                "automountServiceAccountToken": False,
                "terminationGracePeriodSeconds": 1,
                "securityContext": {
                    "runAsNonRoot": True,
                    "runAsUser": 65532,
                    "seccompProfile": {"type": "RuntimeDefault"},
                },
                "volumes": [{"name": "stand-in", "configMap": {"name": "hub"}}],
                "containers": [
                    {
                        "name": "hub",
                        "image": tool("image", "runtime"),
                        "command": ["sh", "-c", _START],
                        "volumeMounts": [{"name": "stand-in", "mountPath": "/stand-in"}],
                        "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 1},
                        "securityContext": {
                            "allowPrivilegeEscalation": False,
                            "capabilities": {"drop": ["ALL"]},
                        },
                    }
                ],
            },
        },
    )
    try:
        kube.run("wait", "--for=condition=Ready", "pod/hub", "--timeout=120s", timeout_seconds=150)
        yield f"http://hub.{kube.namespace}.svc.cluster.local:{PORT}"
    finally:
        stop_hub(kube)


def stop_hub(kube: Kube) -> None:
    """Delete the hub's pod at once, if it is there."""
    kube.run("delete", "pod", "hub", "--grace-period=0", "--force", "--ignore-not-found")


def deliveries(kube: Kube) -> dict[str, int]:
    """Return how often each file was downloaded."""
    counts: dict[str, int] = json.loads(kube.execute("hub", "python3", "-c", _COUNT))
    return counts
