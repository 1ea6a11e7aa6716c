"""Failures as users see them, and an operator killed at the worst time."""

import json

from kube import Kube, inference_service, wait

APP = "app.kubernetes.io/name=skiff-operator"


def test_a_model_path_that_crashes_shows_its_reason_and_log(kube: Kube, operator: Kube) -> None:
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "empty"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    kube.apply(claim, inference_service("broken", model={"uri": "pvc://empty/no/such/model"}))

    def status() -> dict[str, object]:
        found: dict[str, object] = (kube.get("infsvc", "broken") or {}).get("status", {})
        return found

    wait(
        lambda: "lastFailure" in status() and kube.condition("broken").get("reason") == "CrashLoop",
        timeout_seconds=180,
        explain=lambda: json.dumps(status(), indent=1),
    )
    failure = status()["lastFailure"]
    assert isinstance(failure, dict)
    assert failure["exitCode"] == 2
    assert "no/such/model does not exist" in failure["logTail"]
    assert failure["pod"].startswith("broken-")
    kube.run("delete", "infsvc", "broken", "--timeout=60s")


def test_an_image_that_does_not_exist_is_named(kube: Kube, operator: Kube) -> None:
    runtime = {"device": "cpu", "image": "localhost/skiff/no-such-image:1"}
    kube.apply(inference_service("imageless", runtime=runtime))
    wait(
        lambda: kube.condition("imageless").get("reason") == "ImagePullFailed",
        timeout_seconds=120,
        explain=lambda: json.dumps(kube.condition("imageless")),
    )
    assert "no-such-image" in kube.condition("imageless")["message"]
    kube.run("delete", "infsvc", "imageless", "--timeout=60s")


def test_an_operator_killed_in_the_middle_resumes(kube: Kube, operator: Kube) -> None:
    names = [f"many{index}" for index in range(6)]
    pods = {pod["metadata"]["name"] for pod in operator.list("pods", APP)}
    unscheduled = {"no-such-label": "true"}
    kube.apply(*(inference_service(name, nodeSelector=unscheduled) for name in names))
    operator.run("delete", "pods", *sorted(pods), "--force", "--grace-period=0")
    wait(
        lambda: all(kube.get("deployment", name) and kube.get("service", name) for name in names),
        timeout_seconds=120,
    )
    wait(
        lambda: all(kube.condition(name).get("status") == "False" for name in names),
        timeout_seconds=120,
        explain=lambda: str([kube.condition(name) for name in names]),
    )
    assert not pods & {pod["metadata"]["name"] for pod in operator.list("pods", APP)}
    kube.run("delete", "infsvc", *names, "--timeout=60s")
    wait(lambda: not any(kube.get("deployment", name) for name in names), timeout_seconds=60)
