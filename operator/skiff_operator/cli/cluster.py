"""The connection of a command to a cluster: the user's kubeconfig, one namespace, and blocking requests.

The requests are those of the operator's client. Without a kubeconfig, in a pod, the credentials are the pod's.
"""

import argparse
import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import quote

from kubernetes.aio import config
from kubernetes.aio.client.configuration import Configuration

from skiff_operator.client import JSON_PATCH, MERGE_PATCH, Client
from skiff_operator.errors import ApiNotFound, ApiRefused, ApiUnavailable, OperatorError
from skiff_operator.kinds import INFERENCE_SERVICE, Kind

T = TypeVar("T")

FIELD_MANAGER: Final = "kubectl-skiff"
_POD_NAMESPACE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that choose a cluster and a namespace; they have kubectl's names."""
    group = parser.add_argument_group("cluster")
    group.add_argument("-n", "--namespace", help="namespace (default: the context's)")
    group.add_argument("--context", help="context of the kubeconfig (default: its current one)")
    group.add_argument(
        "--kubeconfig", metavar="FILE", help="kubeconfig (default: $KUBECONFIG, else ~/.kube/config)"
    )


@contextlib.contextmanager
def connected(arguments: argparse.Namespace) -> Iterator["Cluster"]:
    """Yield the cluster that the flags choose.

    Raises:
        OperatorError: no kubeconfig chooses one.
    """
    with asyncio.Runner() as runner:
        configuration, namespace = runner.run(_configure(arguments.kubeconfig, arguments.context))
        cluster = Cluster(runner, configuration, arguments.namespace or namespace)
        try:
            yield cluster
        finally:
            cluster.close()


async def _configure(kubeconfig: str | None, context: str | None) -> tuple[Configuration, str]:
    """Return the credentials, and the namespace of the context."""
    settings = Configuration()
    logging.getLogger("kubernetes").addHandler(logging.NullHandler())  # its warnings repeat the error below
    try:
        await config.load_kube_config(kubeconfig, context, settings)
        contexts, current = config.list_kube_config_contexts(kubeconfig)
    except (config.ConfigException, OSError, ValueError) as error:
        if kubeconfig is None and context is None:
            with contextlib.suppress(config.ConfigException):
                config.load_incluster_config(client_configuration=settings)
                return settings, _POD_NAMESPACE.read_text().strip()
        raise OperatorError(f"no cluster: the kubeconfig gave: {error}") from error
    chosen = current if context is None else next(each for each in contexts if each["name"] == context)
    return settings, chosen["context"].get("namespace") or "default"


class Cluster:
    """One namespace of a cluster. Each method blocks until the API server has answered."""

    def __init__(self, runner: asyncio.Runner, configuration: Configuration, namespace: str) -> None:
        """Send requests on the event loop of `runner`."""
        self.namespace = namespace
        self._runner = runner
        self.client = Client(configuration, connections=8)

    def close(self) -> None:
        """Close all connections."""
        self._runner.run(self.client.close())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine that sends requests by `client`, and return its result.

        Raises:
            OperatorError: the API server does not answer, or refused.
        """
        try:
            return self._runner.run(work)
        except ApiUnavailable as error:
            if error.__cause__ is None:
                raise  # the API server answered, but it is busy
            raise OperatorError(f"the API server does not answer: {error.__cause__}") from error

    def get(self, kind: Kind, name: str) -> dict[str, Any]:
        """Return one object of the namespace.

        Raises:
            OperatorError: there is none, or the user may not read it.
        """
        try:
            return self.run(self.client.get(kind, self.namespace, quote(name, safe="")))
        except ApiNotFound as error:
            raise self._explained(kind, error) from error

    def service(self, name: str) -> dict[str, Any]:
        """Return an InferenceService by its name, or by `infsvc/NAME` as kubectl prints it."""
        kind, _, bare = name.rpartition("/")
        if kind.partition(".")[0] not in ("", "inferenceservice", "inferenceservices", "infsvc", "skiff"):
            raise OperatorError(f"{name} is no InferenceService")
        return self.get(INFERENCE_SERVICE, bare)

    def list(self, kind: Kind, *, selector: str = "") -> list[dict[str, Any]]:
        """Return all objects of a kind in the namespace, by label selector."""

        async def collect() -> list[dict[str, Any]]:
            return [each async for each in self.client.list(kind, self.namespace, selector=selector)]

        return self.run(collect())

    def merge(self, kind: Kind, name: str, patch: dict[str, Any]) -> dict[str, Any]:
        """Change an object by a JSON merge patch. A patch with `metadata.resourceVersion` changes only that version."""
        path = kind.path(self.namespace, quote(name, safe=""))
        query = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict"}
        return self.run(self.client.request("PATCH", path, patch, query=query, content_type=MERGE_PATCH))

    def replace_spec(self, kind: Kind, live: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
        """Replace the spec of an object, unless it has changed since `live` was read; its status may have.

        Raises:
            OperatorError: it has changed.
        """
        meta = live["metadata"]
        operations = [
            {"op": "test", "path": "/metadata/uid", "value": meta["uid"]},
            {"op": "test", "path": "/metadata/generation", "value": meta["generation"]},
            {"op": "replace", "path": "/spec", "value": spec},
        ]
        path, query = kind.path(self.namespace, meta["name"]), {"fieldManager": FIELD_MANAGER}
        try:
            return self.run(
                self.client.request("PATCH", path, operations, query=query, content_type=JSON_PATCH)
            )
        except ApiRefused as error:
            if "test" in str(error) and "failed" in str(error):
                raise OperatorError(f"{meta['name']} was changed meanwhile; try again") from error
            raise

    def text(self, path: str, **query: str) -> str:
        """Return the text of a GET request, such as a pod's log."""
        return self.run(self.client.send("GET", path, query=query)).decode(errors="replace")

    def _explained(self, kind: Kind, error: ApiRefused) -> OperatorError:
        """Return an error that names a missing CRD, for which the API server answers 404 without a name."""
        if "could not find the requested resource" in str(error) or "page not found" in str(error):
            return OperatorError(
                f"this cluster serves no {kind.plural}.{kind.group}; is the chart installed?"
            )
        return OperatorError(f"{error} in namespace {self.namespace}")
