"""From `kubectl apply` to tokens, and to the deletion; in the order of a service's life. test_traffic.py has what changes meanwhile."""

import json

import pytest
from kube import Kube, KubectlError, inference_service, wait

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
