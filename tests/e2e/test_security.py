"""API keys from a Secret, rotated while the pod serves, and the NetworkPolicy of an InferenceService."""

from collections.abc import Iterator

import pytest
from kube import Kube, inference_service, wait

NAME = "guarded"
OLD, NEW = "sk-old-key", "sk-new-key"
SYNC_SECONDS = 150
"""The kubelet renews mounted Secrets about every minute; a change of the pod makes it look at once."""


def write_keys(kube: Kube, text: str) -> None:
    """Write the Secret, and make the kubelet look at it."""
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": f"{NAME}-keys"}}
    kube.apply({**secret, "stringData": {"keys": text}})
    for pod in kube.list("pods", f"serving.skiff.dev/inferenceservice={NAME}"):
        kube.run("annotate", "pod", pod["metadata"]["name"], f"changed={abs(hash(text))}", "--overwrite")


@pytest.fixture
def guarded(kube: Kube) -> Iterator[str]:
    """A service with keys and a policy, Ready."""
    write_keys(kube, f"team-a: {OLD}\n")
    kube.apply(inference_service(NAME, apiKeysSecretRef={"name": f"{NAME}-keys"}, networkPolicy={}))
    kube.wait_ready(NAME)
    yield f"http://{NAME}/v1/models"
    kube.run("delete", "infsvc", NAME, "--timeout=60s")
    kube.run("delete", "secret", f"{NAME}-keys")


def test_keys_rotate_without_a_restart(kube: Kube, client: str, guarded: str) -> None:
    def status(key: str) -> str:
        words = ["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", guarded]
        return kube.execute(client, *words, *(["-H", f"Authorization: Bearer {key}"] if key else []))

    assert [status(key) for key in ("", NEW, OLD)] == ["401", "401", "200"]
    (before,) = kube.list("pods", f"serving.skiff.dev/inferenceservice={NAME}")
    write_keys(kube, f"team-a: {OLD}\nteam-a-next: {NEW}\n")
    wait(lambda: status(NEW) == "200", timeout_seconds=SYNC_SECONDS)
    assert status(OLD) == "200"
    write_keys(kube, f"team-a-next: {NEW}\n")
    wait(lambda: status(OLD) == "401", timeout_seconds=SYNC_SECONDS)
    assert status(NEW) == "200"
    (after,) = kube.list("pods", f"serving.skiff.dev/inferenceservice={NAME}")
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert after["status"]["containerStatuses"][0]["restartCount"] == 0
    policy = kube.get("networkpolicy", NAME)
    assert policy is not None and policy["spec"]["ingress"][0]["from"][1:] == [{"podSelector": {}}]
