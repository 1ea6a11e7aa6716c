"""Broken watches: what was deleted meanwhile is found, in every namespace, and nothing else is forgotten.

The operator runs as its own ServiceAccount behind a proxy that cuts, stalls and refuses its connections to a real
API server, beside the controller manager's garbage collector.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from apiserver import ApiServer
from controlplane import ControlPlane
from fault_proxy import FaultProxy, listing, watching
from operator_checks import (
    CHILDREN,
    assert_no_ghost,
    assert_served,
    create,
    delete,
    known,
    probe,
    resynced,
    settle,
)
from operator_process import OperatorProcess, eventually

KINDS = ("inferenceservices", *CHILDREN, "persistentvolumeclaims", "poddisruptionbudgets", "pods")
LABEL = "serving.skiff.dev/inferenceservice"
# The Role of the operator allows one Lease only, which every test takes over under the same identity.
LONG_LEASE = ("--lease-duration-seconds", "600", "--lease-renew-seconds", "200")
Start = Callable[..., OperatorProcess]


@pytest.fixture
def proxy(plane: ControlPlane, server: ApiServer) -> Iterator[FaultProxy]:
    """A proxy in front of the API server."""
    proxy = FaultProxy(plane.kubeconfig)
    proxy.start()
    yield proxy
    proxy.stop()


@pytest.fixture
def other(api: ApiServer) -> ApiServer:
    """A second namespace of the test's own."""
    other = api.in_namespace(f"too-{api.namespace}"[:63].strip("-"))
    other.create_namespace()
    return other


@pytest.fixture
def start(
    api: ApiServer, other: ApiServer, proxy: FaultProxy, operator_kubeconfig: Path, tmp_path: Path
) -> Iterator[Start]:
    """Start an operator of both namespaces behind the proxy."""
    kubeconfig = proxy.through(operator_kubeconfig, tmp_path / "kubeconfig")
    with contextlib.ExitStack() as stack:

        def start(*flags: str, wait: bool = True) -> OperatorProcess:
            own = ["--namespaces", f"{api.namespace},{other.namespace}", "--identity", "watches"]
            quick = ["--status-delay-seconds", "0.1", "--resync-seconds", "0.6", *LONG_LEASE, *flags]
            operator = OperatorProcess(kubeconfig, tmp_path / "log", *own, *quick)
            stack.callback(operator.end)
            operator.start(wait=wait)
            return operator

        yield start


def relist(proxy: FaultProxy, plural: str, namespace: str, how: str) -> None:
    """Answer a watch with 410 Gone, in its stream or as its status, and wait for the new list."""
    before = proxy.lists(plural, namespace)
    proxy.refuse(watching(plural, namespace), 410, times=1, in_stream=how == "event")
    proxy.cut(watching(plural, namespace))
    eventually(lambda: proxy.lists(plural, namespace) > before, f"{plural} are listed again")


def test_everything_is_listed_once_and_a_restart_writes_nothing(
    api: ApiServer, other: ApiServer, proxy: FaultProxy, start: Start
) -> None:
    operator = start()
    create(api, "one")
    create(other, "two")
    settle(operator)
    assert operator.stop() == 0
    proxy.answered.clear()
    operator.start()
    eventually(lambda: probe(operator, "/readyz") == (200, "ok"), "both namespaces are synced")
    resynced(operator)
    lists = {
        (plural, each.namespace): proxy.lists(plural, each.namespace)
        for plural in KINDS
        for each in (api, other)
    }
    assert set(lists.values()) == {1}, lists
    assert operator.writes() == 0
    assert known(operator) == 2


def test_a_list_of_one_namespace_forgets_nothing_of_another(
    api: ApiServer, other: ApiServer, proxy: FaultProxy, start: Start
) -> None:
    operator = start()
    create(api, "here")
    create(other, "there")
    settle(operator)
    relist(proxy, "inferenceservices", api.namespace, "event")
    relist(proxy, "deployments", api.namespace, "event")
    relist(proxy, "services", api.namespace, "status")
    writes = operator.writes()
    resynced(operator)
    assert known(operator) == 2
    assert operator.writes() == writes
    assert_served(other, operator, "there")


@pytest.mark.parametrize("how", ["event", "status"])
def test_a_deletion_that_leaves_an_empty_list_is_found(
    api: ApiServer, proxy: FaultProxy, start: Start, how: str
) -> None:
    operator = start()
    create(api, "last")
    proxy.hold(f"/namespaces/{api.namespace}/")
    delete(api, "last")
    proxy.refuse(watching("inferenceservices", api.namespace), 410, times=1, in_stream=how == "event")
    listed = proxy.lists("inferenceservices", api.namespace)
    proxy.release()
    proxy.cut(f"/namespaces/{api.namespace}/")
    eventually(
        lambda: proxy.lists("inferenceservices", api.namespace) > listed, "the services are listed again"
    )
    assert_no_ghost(api, operator, "last")
    assert known(operator) == 0


def test_deletions_that_a_restarted_api_server_does_not_report_are_found(
    api: ApiServer, other: ApiServer, proxy: FaultProxy, start: Start, plane: ControlPlane
) -> None:
    """A new API server's watch cache begins after the deletions, so it answers the old watches with 410 itself.

    The short timeout bounds the pauses between attempts, which double while the API server is away.
    """
    operator = start("--watch-timeout-seconds", "2")
    create(api, "last")
    create(other, "gone", "stays")
    proxy.down()
    delete(api, "last")
    delete(other, "gone")
    plane.restart("kube-apiserver")
    proxy.up()
    eventually(lambda: proxy.expired, "the API server answers 410")
    eventually(lambda: proxy.lists("deployments", other.namespace) > 1, "Deployments are listed again")
    eventually(lambda: known(operator) == 1, "the deletions are found")
    assert_no_ghost(api, operator, "last")
    assert_no_ghost(other, operator, "gone")
    assert_served(other, operator, "stays")


def test_a_connection_that_is_stalled_and_never_closed_is_replaced(
    api: ApiServer, other: ApiServer, proxy: FaultProxy, start: Start
) -> None:
    operator = start("--watch-timeout-seconds", "2")
    create(api, "last")
    create(other, "stays")
    proxy.hold("watch=true")
    delete(api, "last")
    proxy.release()
    eventually(lambda: known(operator) == 1, "the deletion is found")
    assert_no_ghost(api, operator, "last")
    assert_served(other, operator, "stays")
    assert probe(operator, "/healthz") == (200, "ok")


def test_one_dead_watch_fails_the_probes_by_its_name(
    api: ApiServer, other: ApiServer, proxy: FaultProxy, start: Start
) -> None:
    operator = start("--watch-timeout-seconds", "2")
    eventually(lambda: probe(operator, "/readyz") == (200, "ok"), "both namespaces are synced")
    proxy.hold(watching("poddisruptionbudgets", other.namespace))
    reason = f"poddisruptionbudgets in namespace {other.namespace} has shown no sign of life"
    eventually(lambda: reason in probe(operator, "/healthz")[1], "the probe names the watch")
    assert probe(operator, "/healthz")[0] == 503
    assert probe(operator, "/readyz")[0] == 503
    silence = f"skiff_operator_watch_silence_seconds{{resource=poddisruptionbudgets,watch_namespace={other.namespace}}}"
    assert operator.metrics()[silence] > 9
    proxy.release()
    eventually(lambda: probe(operator, "/healthz") == (200, "ok"), "the watch lives again")


def test_lists_that_are_refused_at_start_are_retried(
    api: ApiServer, other: ApiServer, proxy: FaultProxy, start: Start
) -> None:
    for status in (403, 404, 410, 429, 500):
        proxy.refuse(listing("inferenceservices", api.namespace), status, times=1)
    proxy.refuse(listing("services", other.namespace), 500, times=2)
    operator = start()
    eventually(lambda: probe(operator, "/readyz") == (200, "ok"), "all is synced")
    for status in (403, 404, 429, 500):
        assert f"status={status}" in operator.log.read_text()
    create(api, "one")


def test_an_api_server_that_is_not_there_yet_is_waited_for(
    api: ApiServer, proxy: FaultProxy, start: Start
) -> None:
    proxy.refuse("^/apis?(/|$)(?!.*leases)", 503)
    operator = start(wait=False)
    eventually(lambda: "503" in operator.log.read_text(), "it reports the error")
    assert "not listed yet" in eventually(lambda: probe(operator, "/readyz")[1], "a probe")
    proxy.down()
    time.sleep(1)
    proxy.allow()
    proxy.up()
    eventually(operator.leads, "it works")
    create(api, "one")


def test_a_namespace_that_may_not_be_read_keeps_no_other_from_service(
    api: ApiServer, other: ApiServer, proxy: FaultProxy, start: Start
) -> None:
    """As after the deletion of a namespace with its Role, or a wrong name in the settings."""
    proxy.refuse(f"/namespaces/{other.namespace}/(?!leases)", 403)
    operator = start("--watch-timeout-seconds", "2")
    create(api, "one")
    time.sleep(10)  # longer than a silent watch may live
    assert_served(api, operator, "one")
    assert probe(operator, "/healthz") == (200, "ok")
    status, reason = probe(operator, "/readyz")
    assert status == 503 and other.namespace in reason and "as the test asks" in reason
    proxy.allow()
    eventually(lambda: probe(operator, "/readyz") == (200, "ok"), "both namespaces are synced")
    create(other, "two")


def test_a_child_that_lost_its_label_is_repaired_in_place(api: ApiServer, start: Start) -> None:
    """To a watch with a label selector that looks like a deletion; the object lives on."""
    start()
    create(api, "one")
    before = {plural: api.get(plural, "one")["metadata"]["uid"] for plural in CHILDREN}
    for label in (None, "another"):
        for plural in CHILDREN:
            api.merge(plural, "one", {"metadata": {"labels": {LABEL: label}}})
        for plural in CHILDREN:
            eventually(partial(_labelled, api, plural, "one"), f"the label of {plural}")
    assert {plural: api.get(plural, "one")["metadata"]["uid"] for plural in CHILDREN} == before


def _labelled(api: ApiServer, plural: str, name: str) -> bool:
    return bool(api.get(plural, name)["metadata"]["labels"].get(LABEL) == name)
