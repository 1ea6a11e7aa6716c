"""From `kubectl apply` to tokens, through every change that a user makes; in the order of a service's life."""

import json
import subprocess
from pathlib import Path

import pytest
from kube import Kube, KubectlError, Object, inference_service, wait

from skiff_runtime.contract import API_PORT

TRAFFIC = (Path(__file__).parents[1] / "support" / "traffic.py").read_text()
URL = "http://llama"
ANSWERED = 'skiff_requests_total{endpoint="chat",outcome="finished"} '
OPENAI = """
import openai, sys
client = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="none", max_retries=0)
model = client.models.list().data[0].id
chunks = client.chat.completions.create(
    model=model, messages=[{"role": "user", "content": "What is a pod?"}], temperature=0, max_tokens=64, stream=True)
parts = [c.choices[0].delta.content or "" for c in chunks if c.choices]
assert len(parts) > 3, parts
print("".join(parts))
"""


def traffic(kube: Kube, client: str, seconds: float) -> "subprocess.Popen[str]":
    """Start requests from the client pod through the Service; ``finished`` collects them."""
    command = kube.command(
        "exec", "-i", client, "--", "python3", "-", f"{URL}/v1", "skiff-demo", str(seconds), "4"
    )
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    process.stdin.write(TRAFFIC)
    process.stdin.close()
    return process


def finished(process: "subprocess.Popen[str]") -> None:
    """No request failed, and all got the same answer."""
    assert process.stdout is not None and process.stderr is not None
    out, err = process.stdout.read(), process.stderr.read()
    assert process.wait(timeout=120) == 0, err
    report = json.loads(out)
    assert report["requests"] > 20, report
    assert report["failed"] == 0, report
    assert len(report["distinct_answers"]) == 1, report


def test_curl_gets_an_answer_through_service_dns(kube: Kube, client: str, llama: str) -> None:
    body = {
        "model": "skiff-demo",
        "temperature": 0,
        "messages": [{"role": "user", "content": "What is a pod?"}],
    }
    url = f"http://{llama}.{kube.namespace}.svc.cluster.local/v1/chat/completions"
    text = kube.execute(client, "curl", "-sS", "--fail", url, "-H", "Content-Type: application/json",
                        "-d", json.dumps(body))  # fmt: skip
    answer = json.loads(text)
    assert "pod" in answer["choices"][0]["message"]["content"].lower()
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_the_openai_client_streams(kube: Kube, client: str, llama: str) -> None:
    answer = kube.execute(client, "python3", "-", f"http://{llama}", text=OPENAI)
    assert "pod" in answer.lower()


def test_status_and_columns_tell_the_user_what_is_served(kube: Kube, llama: str) -> None:
    found = kube.get("infsvc", llama)
    assert found is not None
    status = found["status"]
    assert status["readyReplicas"] == status["replicas"] == status["updatedReplicas"] == 1
    assert llama in status["url"]
    assert status["currentRevision"] == status["updateRevision"] != ""
    columns = kube.run("get", "skiff", llama)
    assert {"READY", "REPLICAS", "MODEL", "URL", "AGE"} <= set(columns.split("\n")[0].split())


def test_serving_pods_are_restricted(kube: Kube, llama: str) -> None:
    (pod,) = kube.list("pods", f"serving.skiff.dev/inferenceservice={llama}")
    container = pod["spec"]["containers"][0]
    assert pod["spec"]["automountServiceAccountToken"] is False
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]


def scale_out(kube: Kube, name: str) -> None:
    """Two replicas, both ready."""
    kube.run("scale", "infsvc", name, "--replicas=2")
    wait(
        lambda: (kube.get("infsvc", name) or {})["status"].get("readyReplicas") == 2,
        timeout_seconds=180,
        explain=lambda: str((kube.get("infsvc", name) or {}).get("status")),
    )


def wait_for_pods(kube: Kube, name: str, count: int) -> list[Object]:
    """Wait for this number of pods of a service, draining ones included, and return them."""
    selector = f"serving.skiff.dev/inferenceservice={name}"
    wait(lambda: len(kube.list("pods", selector)) == count, timeout_seconds=180)
    return kube.list("pods", selector)


def answered(kube: Kube, client: str, pod: Object) -> float:
    """Return the number of chats that this pod has answered."""
    url = f"http://{pod['status']['podIP']}:{API_PORT}/metrics"
    page = kube.execute(client, "curl", "-sS", "--fail", url).splitlines()
    [value] = [line.removeprefix(ANSWERED) for line in page if line.startswith(ANSWERED)]
    return float(value)


def test_scale(kube: Kube, llama: str) -> None:
    scale_out(kube, llama)
    assert kube.list("poddisruptionbudgets", f"serving.skiff.dev/inferenceservice={llama}")


def test_an_edit_rolls_without_a_failed_request(kube: Kube, client: str, llama: str) -> None:
    before = kube.get("infsvc", llama)
    assert before is not None
    running = traffic(kube, client, 60)
    kube.run("patch", "infsvc", llama, "--type=merge", "-p", '{"spec": {"runtime": {"maxModelLen": 1024}}}')
    kube.wait_ready(llama)
    after = kube.get("infsvc", llama)
    assert after is not None
    assert after["status"]["updateRevision"] != before["status"]["updateRevision"]
    finished(running)


def test_scaling_in_fails_no_request(kube: Kube, client: str, llama: str) -> None:
    """One of two pods goes while both answer."""
    scale_out(kube, llama)
    before = [(pod, answered(kube, client, pod)) for pod in wait_for_pods(kube, llama, 2)]
    running = traffic(kube, client, 60)
    wait(
        lambda: all(answered(kube, client, pod) > count for pod, count in before),
        timeout_seconds=60,
    )
    kube.run("scale", "infsvc", llama, "--replicas=1")
    assert running.poll() is None, "the traffic was over before the scaling"
    finished(running)
    wait_for_pods(kube, llama, 1)
    assert not kube.list("poddisruptionbudgets", f"serving.skiff.dev/inferenceservice={llama}")


@pytest.mark.parametrize(
    "spec,said",
    [
        ({"model": {"uri": "ftp://x/y"}}, "uri"),
        ({"replicas": -1}, "replicas"),
        ({"parallelism": {"tensor": 0}}, "tensor"),
        ({"cache": {"claimName": "a", "size": "1Gi"}}, "cache"),
        ({"no_such_field": 1}, "no_such_field"),
    ],
)
def test_a_bad_spec_is_refused_with_a_hint(kube: Kube, spec: dict[str, object], said: str) -> None:
    with pytest.raises(KubectlError, match=said):
        kube.apply(inference_service("bad", **spec))


def test_delete_removes_everything(kube: Kube, llama: str) -> None:
    kube.run("delete", "infsvc", llama, "--timeout=60s")
    selector = f"serving.skiff.dev/inferenceservice={llama}"
    kinds = (
        "deployments",
        "services",
        "serviceaccounts",
        "poddisruptionbudgets",
        "pods",
        "persistentvolumeclaims",
    )
    wait(
        lambda: not any(kube.list(kind, selector) for kind in kinds),
        timeout_seconds=120,
        explain=lambda: str([kube.list(kind, selector) for kind in kinds]),
    )
