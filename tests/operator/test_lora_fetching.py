"""LoRAAdapters with credentials: a pod downloads them into the claim that the serving pods share, and only it has the Secret."""

from contextlib import ExitStack
from typing import Any

import pytest
from apiserver import ApiServer
from lora_objects import LAW, SQL, adapter, ready, service
from lora_pods import LoRAPods
from operator_process import eventually

SECRET = {"credentialsSecretRef": {"name": "hub"}}
HUB: dict[str, Any] = {"model": {"uri": "hf://org/base"}, "lora": {}}


def fetchers(api: ApiServer) -> list[Any]:
    """The fetchers of adapters."""
    return api.list("pods", "app.kubernetes.io/name=skiff-fetcher")


def report(api: ApiServer, pod: Any, state: dict[str, Any], phase: str) -> None:
    """Write the state of a fetcher's container, as a kubelet does."""
    container = {
        "name": "fetch",
        "image": "x",
        "imageID": "",
        "ready": False,
        "restartCount": 1,
        "state": state,
    }
    api.merge(
        "pods",
        pod["metadata"]["name"],
        {"status": {"phase": phase, "containerStatuses": [container]}},
        "status",
    )


@pytest.mark.usefixtures("operator")
def test_a_pod_with_the_secret_downloads_into_the_claim_and_the_others_load(api: ApiServer) -> None:
    api.create("inferenceservices", service(**HUB, cache={"size": "10Gi"}))
    with ExitStack() as stack:
        pods = LoRAPods(api, 21, stack)
        first, second = pods.serve(2)
        api.create("loraadapters", adapter("law", LAW, **SECRET))
        eventually(lambda: ready(api, "law")[1] == "Fetching", "it is downloaded")
        (pod,) = fetchers(api)
        (container,) = pod["spec"]["containers"]
        assert container["args"] == ["fetch", "--model", LAW, "--download-dir", "/cache", "--adapter-only"]
        assert container["resources"] == {"requests": {"cpu": "100m", "memory": "256Mi"}}
        (token,) = [each for each in container["env"] if each["name"] == "HF_TOKEN"]
        assert token["valueFrom"] == {"secretKeyRef": {"name": "hub", "key": "token"}}
        claims = [each.get("persistentVolumeClaim") for each in pod["spec"]["volumes"]]
        assert {"claimName": "llama-cache"} in claims
        assert "serving.skiff.dev/inferenceservice" not in pod["metadata"]["labels"], "no Service finds it"
        assert first.calls == second.calls == []
        serving = api.get("deployments", "llama")["spec"]["template"]["spec"]
        assert "hub" not in str(serving), "serving pods have no credentials"
        ended = {"terminated": {"exitCode": 5, "message": "error=Unauthorized the hub wants a token"}}
        report(api, pod, ended, "Running")
        eventually(lambda: ready(api, "law")[1] == "FetchFailed", "the reason is reported")
        assert first.calls == second.calls == []
        report(api, pod, ended, "Failed")
        eventually(
            lambda: len(fetchers(api)) == 2, "another pod takes the place of one that will not run again"
        )
        (pod,) = [each for each in fetchers(api) if each["metadata"]["uid"] != pod["metadata"]["uid"]]
        report(api, pod, {"terminated": {"exitCode": 0}}, "Succeeded")
        eventually(lambda: ready(api, "law")[0] == "True", "the pods load it from the claim")
        assert first.adapters == second.adapters == {"law": LAW}
        # Another secret is another download; the pods keep what they have meanwhile.
        api.merge("loraadapters", "law", {"spec": {"credentialsSecretRef": {"name": "other"}}})
        eventually(lambda: ready(api, "law")[1] == "Fetching", "another fetcher")
        assert first.adapters == second.adapters == {"law": LAW}
        api.delete("loraadapters", "law")
        eventually(lambda: first.adapters == second.adapters == {}, "unloaded")
        eventually(lambda: not fetchers(api), "the fetchers are collected")


@pytest.mark.usefixtures("operator")
def test_without_a_shared_claim_credentials_are_refused(api: ApiServer) -> None:
    api.create("inferenceservices", service(**HUB, replicas=0))
    api.create("loraadapters", adapter("law", LAW, **SECRET))
    api.create("loraadapters", adapter("sql", SQL))
    eventually(lambda: ready(api, "law")[1] == "NoSharedCache", "nowhere to download to")
    eventually(lambda: ready(api, "sql")[1] == "NoPods", "without credentials, pods download")
    assert not fetchers(api)
