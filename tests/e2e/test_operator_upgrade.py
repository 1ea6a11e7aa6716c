"""Upgrades of the operator by Helm, after which it would give pods another template: no pod is replaced unasked.

The other template comes from `runtimeImage.pullSecrets`, because any cluster has a second value for that.
"""

import datetime
import json
import time
from collections.abc import Iterator
from typing import Any, Final

import pytest
from helm import CHART, RELEASE, Helm
from kube import Kube, inference_service, skiff, wait
from traffic_reports import check_answers
from traffic_run import TrafficRun

NAMES: Final = ("upgrade-a", "upgrade-b")
MODEL: Final = "skiff-demo"
DEMO: Final = "demo"
REGISTRY: Final = "registry"
RATE: Final = 10.0
QUIET_SECONDS: Final = 3.0
SETTLE_SECONDS: Final = 240.0
ANALYSIS: Final = {"minRequests": 10, "observationSeconds": 25}
"""The pods are read every 10 s, and so at least once in an observation."""


@pytest.fixture
def services(kube: Kube, client: str, helm: Helm, operator: Kube) -> Iterator[TrafficRun]:
    """Two services whose rollouts are analyzed, and a driver with the right answers; the release is as before afterwards."""
    kube.apply(
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": REGISTRY},
            "type": "kubernetes.io/dockerconfigjson",
            "stringData": {".dockerconfigjson": '{"auths": {}}'},
        },
        *(inference_service(name, rollout={"autoRollback": True, "analysis": ANALYSIS}) for name in NAMES),
    )
    for name in NAMES:
        kube.wait_ready(name)
    run = TrafficRun(kube, client, name="upgrade", port=8710)
    run.record(f"http://{NAMES[0]}", MODEL, DEMO)
    yield run
    upgrade(helm, operator, "Manual", [])
    kube.run("delete", "infsvc", *NAMES, "--timeout=120s", timeout_seconds=150)
    kube.run("delete", "secret", REGISTRY)


def upgrade(helm: Helm, operator: Kube, policy: str, secrets: list[dict[str, str]]) -> None:
    """Upgrade the release, and wait until the new operator has taken over."""
    values = [
        "--set",
        f"upgrade.policy={policy}",
        "--set-json",
        f"runtimeImage.pullSecrets={json.dumps(secrets)}",
    ]
    release = [RELEASE, str(CHART), "--namespace", operator.namespace, "--reuse-values"]
    helm.run("upgrade", *release, "--wait", "--timeout", "4m", *values)
    operator.run("rollout", "status", "deployment/skiff-operator", "--timeout=120s", timeout_seconds=150)


def pods(kube: Kube, name: str) -> list[Any]:
    """The pods of a service, those included that are being deleted."""
    return kube.list("pods", f"serving.skiff.dev/inferenceservice={name}")


def uids(kube: Kube) -> dict[str, list[str]]:
    """The uids of the pods of each service."""
    return {name: sorted(pod["metadata"]["uid"] for pod in pods(kube, name)) for name in NAMES}


def has_secret(pod: Any) -> bool:
    """Return whether a pod has the template of the operator with pull secrets."""
    return {"name": REGISTRY} in pod["spec"].get("imagePullSecrets", [])


def analysis(kube: Kube, name: str) -> Any:
    """The analysis of the last rollout."""
    return (kube.get("infsvc", name) or {}).get("status", {}).get("analysis", {})


def replaced(kube: Kube, name: str, *, secret: bool) -> bool:
    """Return whether one pod of the wanted template alone is left, and its analysis has passed."""
    found = pods(kube, name)
    done = [has_secret(pod) for pod in found] == [secret] and kube.is_ready(name)
    return done and analysis(kube, name).get("phase") == "Passed"


def explain(kube: Kube) -> str:
    return json.dumps([(kube.get("infsvc", name) or {}).get("status") for name in NAMES], indent=1)


def time_of(text: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(text)


def test_an_upgrade_restarts_no_pod_until_it_is_asked_for_or_its_wave_comes(
    kube: Kube, helm: Helm, operator: Kube, services: TrafficRun
) -> None:
    before = uids(kube)
    services.start(f"http://{NAMES[0]}", MODEL, rate=RATE, revisions=(DEMO,))
    try:
        services.mark("helm upgrade")
        upgrade(helm, operator, "Manual", [{"name": REGISTRY}])
        for name in NAMES:
            wait(
                lambda: kube.condition(name, "UpgradeAvailable").get("reason") == "TemplatePinned",  # noqa: B023
                timeout_seconds=60,
                explain=lambda: explain(kube),
            )
        time.sleep(QUIET_SECONDS)
        assert uids(kube) == before and all(kube.is_ready(name) for name in NAMES)

        services.mark("skiff rollout upgrade")
        assert skiff(kube, "rollout", "upgrade", NAMES[0])[0] == 0
        wait(
            lambda: replaced(kube, NAMES[0], secret=True),
            timeout_seconds=SETTLE_SECONDS,
            explain=lambda: explain(kube),
        )
        compared = analysis(kube, NAMES[0])
        assert compared["baseline"]["requests"] > 0 and compared["candidate"]["requests"] > 0, compared
        assert uids(kube)[NAMES[1]] == before[NAMES[1]], "the other one was not asked for"
        assert not kube.condition(NAMES[0], "UpgradeAvailable")
        assert skiff(kube, "rollout", "upgrade", NAMES[1])[0] == 0
        wait(
            lambda: replaced(kube, NAMES[1], secret=True),
            timeout_seconds=SETTLE_SECONDS,
            explain=lambda: explain(kube),
        )

        services.mark("waves")
        upgrade(helm, operator, "Waves", [])
        for name in NAMES:
            wait(
                lambda: replaced(kube, name, secret=False),  # noqa: B023
                timeout_seconds=SETTLE_SECONDS,
                explain=lambda: explain(kube),
            )
        time.sleep(QUIET_SECONDS)
    finally:
        report = services.stop()
        print(json.dumps(report["windows"], indent=1))
    check_answers(report)
    first, second = sorted(
        (pods(kube, name)[0] for name in NAMES), key=lambda pod: str(pod["metadata"]["creationTimestamp"])
    )
    [ready] = [each for each in first["status"]["conditions"] if each["type"] == "Ready"]
    began = time_of(second["metadata"]["creationTimestamp"])
    assert began >= time_of(ready["lastTransitionTime"]), "the second wave begins when the first is Ready"
