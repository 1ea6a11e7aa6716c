"""A cluster through kubectl, as a user drives it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
CLUSTER: Final = ROOT / "tests/cluster/cluster.py"
POLL_SECONDS: Final = 0.5

Object = dict[str, Any]


class KubectlError(Exception):
    """kubectl ended with an error; the message is what it wrote."""


def tool(*words: str) -> str:
    """The answer of one command of tests/cluster/cluster.py."""
    done = subprocess.run([sys.executable, CLUSTER, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


class Kube:
    """One namespace of a cluster."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self.kubeconfig = tool("kubeconfig")
        self._base = [tool("kubectl-path"), "--kubeconfig", self.kubeconfig, "--namespace", namespace]

    def command(self, *words: str) -> list[str]:
        """The whole command line, for a caller that runs it in the background."""
        return [*self._base, *words]

    def run(self, *words: str, text: str | None = None, timeout_seconds: float = 120) -> str:
        """Output of a command with ``text`` on its standard input. Raises KubectlError."""
        done = subprocess.run(
            self.command(*words),
            input=text,
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            check=False,
        )
        if done.returncode:
            raise KubectlError(f"kubectl {' '.join(words)}: {done.stderr.strip()}\n{done.stdout}")
        return done.stdout

    def apply(self, *objects: Object) -> None:
        """Create or change objects."""
        listed = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        self.run("apply", "-f", "-", text=json.dumps(listed))

    def get(self, kind: str, name: str) -> Object | None:
        """One object, or None."""
        text = self.run("get", kind, name, "--ignore-not-found", "-o", "json")
        return json.loads(text) if text else None

    def list(self, kind: str, selector: str = "") -> list[Object]:
        """Objects of a kind, by label."""
        words = ["get", kind, "-o", "json", *(["-l", selector] if selector else [])]
        items: list[Object] = json.loads(self.run(*words))["items"]
        return items

    def execute(self, pod: str, *command: str, text: str | None = None, timeout_seconds: float = 120) -> str:
        """Output of a command inside a pod."""
        return self.run("exec", "-i", pod, "--", *command, text=text, timeout_seconds=timeout_seconds)

    def condition(self, name: str, kind: str = "Ready") -> Object:
        """A condition of an InferenceService; empty until there is one."""
        found = self.get("inferenceservice", name) or {}
        conditions = found.get("status", {}).get("conditions", [])
        return next((each for each in conditions if each["type"] == kind), {})

    def is_ready(self, name: str) -> bool:
        """Return whether an InferenceService is Ready in its latest generation."""
        found = self.get("inferenceservice", name)
        if (
            found is None
            or found.get("status", {}).get("observedGeneration") != found["metadata"]["generation"]
        ):
            return False
        return self.condition(name).get("status") == "True"

    def wait_ready(self, name: str, timeout_seconds: float = 240) -> None:
        """Wait until an InferenceService is Ready; shows its status when it is not in time."""
        wait(
            lambda: self.is_ready(name),
            timeout_seconds=timeout_seconds,
            explain=lambda: json.dumps((self.get("inferenceservice", name) or {}).get("status"), indent=1),
        )


def wait(
    condition: Callable[[], bool],
    *,
    timeout_seconds: float,
    explain: Callable[[], str] = lambda: "",
    poll_seconds: float = POLL_SECONDS,
) -> None:
    """Poll until ``condition`` holds; AssertionError with what ``explain`` says when it does not in time."""
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_seconds} s: {explain()}"
        time.sleep(poll_seconds)


def inference_service(name: str, **spec: Any) -> Object:
    """An InferenceService of the demo model on a CPU, with fields of its spec added or replaced."""
    base: Object = {
        "model": {"uri": "demo://", "name": "skiff-demo"},
        "runtime": {"device": "cpu"},
        "resources": {"requests": {"cpu": "100m", "memory": "384Mi"}, "limits": {"memory": "2Gi"}},
    }
    return {
        "apiVersion": "serving.skiff.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": name},
        "spec": {**base, **spec},
    }


def skiff(kube: Kube, *words: str, text: str | None = None) -> tuple[int, str]:
    """Exit code and output of `kubectl skiff` in the namespace of `kube`."""
    flags = ["--kubeconfig", kube.kubeconfig, "-n", kube.namespace]
    paths = os.pathsep.join(str(ROOT / name) for name in ("operator", "runtime"))
    done = subprocess.run(
        [sys.executable, "-m", "skiff_operator.cli.main", *words, *flags],
        input=text,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": paths},
        check=False,
    )
    print(f"$ kubectl skiff {' '.join(words)}    # {done.returncode}\n{done.stdout}{done.stderr}")
    return done.returncode, done.stdout + done.stderr
