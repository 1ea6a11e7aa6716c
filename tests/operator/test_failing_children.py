"""Children fail one by one: what the API server refuses holds up only what needs it, and is tried again."""

from collections.abc import Iterator
from typing import Any

import pytest
from apiserver import ApiServer, Refused
from operator_process import eventually
from services import hub
from strangers import condition, inference_service

pytestmark = pytest.mark.usefixtures("operator")
WEBHOOKS = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"


def create(api: ApiServer, **fields: Any) -> None:
    """Create an InferenceService that needs a PodDisruptionBudget, which is made last."""
    model = {"model": {"uri": "demo://"}, "runtime": {"device": "cpu"}, "replicas": 2}
    api.create("inferenceservices", inference_service("llama", **{**model, **fields}))


def wait_failed(api: ApiServer, message: str) -> None:
    """Wait until the condition says why a child cannot be made or changed."""

    def failed() -> bool:
        status, reason, text = condition(api, "llama")
        return (status, reason) == ("True", "ApplyFailed") and message in text

    eventually(failed, f"ApplyFailed: {message}")


def refuses_services(api: ApiServer) -> bool:
    """Return whether admission knows the quota: it watches quotas, so a Service just behind one may still be created."""
    service = {"metadata": {"name": "beyond-the-quota"}, "spec": {"ports": [{"port": 80}]}}
    try:
        api.request("POST", f"{api.path('services')}?dryRun=All", service)
    except Refused as error:
        return error.status == 403
    return False


def wait_children(api: ApiServer, *plurals: str) -> None:
    """Wait until children of these kinds exist."""
    for plural in plurals:
        eventually(lambda plural=plural: api.find(plural, "llama"), plural)  # type: ignore[misc]


@pytest.fixture
def broken_webhook(api: ApiServer) -> Iterator[str]:
    """A webhook for Services of the test's namespace that cannot be reached; its path."""
    webhook = {
        "name": "broken.skiff.dev",
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "failurePolicy": "Fail",
        "timeoutSeconds": 1,
        "clientConfig": {"url": "https://127.0.0.1:1/"},
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": api.namespace}},
        "rules": [
            {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["services"]}
        ],
    }
    api.request("POST", WEBHOOKS, {"metadata": {"name": api.namespace}, "webhooks": [webhook]})
    yield f"{WEBHOOKS}/{api.namespace}"
    if api.request("GET", f"{WEBHOOKS}?fieldSelector=metadata.name={api.namespace}")["items"]:
        api.request("DELETE", f"{WEBHOOKS}/{api.namespace}")


def test_a_claim_that_cannot_grow_holds_up_nothing_else(api: ApiServer) -> None:
    """The storage refuses; the replicas, and all else that was asked for with it, come all the same."""
    create(api, model=hub(), cache={"size": "1Gi"}, replicas=1)
    wait_children(api, "services")
    changes = {"cache": {"size": "2Gi"}, "replicas": 2, "drain": {"timeoutSeconds": 5}}
    api.merge("inferenceservices", "llama", {"spec": changes})
    wait_failed(api, "llama-cache")
    deployment = api.get("deployments", "llama")["spec"]
    assert deployment["replicas"] == 2
    assert "5" in deployment["template"]["spec"]["containers"][0]["args"]
    wait_children(api, "poddisruptionbudgets")


def test_a_child_beyond_the_quota_holds_up_no_other(api: ApiServer) -> None:
    hard = {"count/services": "0"}
    api.create("resourcequotas", {"metadata": {"name": "no-services"}, "spec": {"hard": hard}})
    eventually(lambda: refuses_services(api), "the quota is enforced")
    create(api)
    wait_failed(api, "quota")
    wait_children(api, "serviceaccounts", "deployments", "poddisruptionbudgets")
    api.delete("resourcequotas", "no-services")
    wait_children(api, "services")
    eventually(lambda: condition(api, "llama")[1] == "AsExpected", "nothing is wrong any more")


def test_a_webhook_that_is_down_holds_up_no_other(api: ApiServer, broken_webhook: str) -> None:
    create(api)
    wait_failed(api, "webhook")
    wait_children(api, "serviceaccounts", "deployments", "poddisruptionbudgets")
    api.request("DELETE", broken_webhook)
    wait_children(api, "services")
    eventually(lambda: condition(api, "llama")[1] == "AsExpected", "nothing is wrong any more")
