"""The real helm program, which renders the chart and installs it on a test API server."""

import contextlib
import functools
import json
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import yaml
from kube import tool

ROOT: Final = Path(__file__).parents[2]
CHART: Final = ROOT / "charts/skiff"
RELEASE: Final = "skiff"
NAMESPACE: Final = "skiff-system"
KUBE_VERSION: Final = "1.30.0"
"""The oldest that the chart accepts; without a cluster, helm would go by its own."""
TIMEOUT_SECONDS: Final = 300


class HelmError(Exception):
    """helm ended with an error; the message is what it wrote."""


class Helm:
    """One helm program, and the cluster that it installs to where `kubeconfig` names one."""

    def __init__(self, kubeconfig: Path | None = None) -> None:
        self._base = [program()]
        if kubeconfig is not None:
            self._base += ["--kubeconfig", str(kubeconfig)]

    def run(self, *words: str) -> str:
        """Return the output of one command. Raises HelmError."""
        command = [*self._base, *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_SECONDS)
        if done.returncode:
            raise HelmError(f"helm {' '.join(words)}: {done.stderr.strip()}\n{done.stdout}")
        return done.stdout

    def render(self, *values: str, release: str = RELEASE, namespace: str = NAMESPACE) -> list[Any]:
        """Return the chart's objects, hooks included."""
        where = ["--namespace", namespace, "--kube-version", KUBE_VERSION]
        text = self.run("template", release, str(CHART), *where, *_sets(values))
        return [body for body in yaml.safe_load_all(text) if body]

    def install(self, *values: str, release: str = RELEASE, namespace: str = NAMESPACE) -> None:
        """Install a release into a namespace that is made where it does not exist."""
        where = ["--namespace", namespace, "--create-namespace"]
        self.run("install", release, str(CHART), *where, *_sets(values))

    def upgrade(self, *values: str, release: str = RELEASE, namespace: str = NAMESPACE) -> None:
        """Upgrade a release to the chart as it is, with these values alone."""
        self.run("upgrade", release, str(CHART), "--namespace", namespace, *_sets(values))

    @contextlib.contextmanager
    def values_restored(self, release: str = RELEASE, namespace: str = NAMESPACE) -> Iterator[None]:
        """Give the release back, at the end, the values that it has at the beginning."""
        where = ["--namespace", namespace]
        before = self.run("get", "values", release, *where, "--output", "json")
        yield
        with tempfile.NamedTemporaryFile("w", suffix=".json") as values:
            values.write(before)
            values.flush()
            waiting = ["--wait", "--timeout", "4m"]
            self.run(
                "upgrade", release, str(CHART), *where, *waiting, "--reset-values", "--values", values.name
            )

    def uninstall(self, release: str = RELEASE, namespace: str = NAMESPACE) -> None:
        """Remove a release."""
        self.run("uninstall", release, "--namespace", namespace)


@functools.cache
def program() -> str:
    """Return the path of the helm on PATH, or of the one that the test cluster's tools build."""
    return tool("helm-path")


def alert_rules(*values: str) -> Any:
    """Return the groups of alert rules as the chart renders them, in Prometheus's format."""
    bodies = Helm().render("monitoring.rules=true", *values)
    (rule,) = [body for body in bodies if body["kind"] == "PrometheusRule"]
    return rule["spec"]


def hooks(bodies: Sequence[Any]) -> list[Any]:
    """Return the objects that are hooks, which Helm makes and removes beside the release."""
    return [each for each in bodies if "helm.sh/hook" in each["metadata"].get("annotations", {})]


def _sets(values: Sequence[str]) -> list[str]:
    """Return the flags for values: `a=b` is text or a number, `a:=b` is JSON."""
    words: list[str] = []
    for value in values:
        name, json_mark, content = value.partition(":=")
        if json_mark:
            json.loads(content)
            words += ["--set-json", f"{name}={content}"]
        else:
            words += ["--set", value]
    return words
