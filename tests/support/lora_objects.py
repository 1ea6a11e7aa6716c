"""InferenceServices with LoRA adapters and LoRAAdapters on a test API server, and what their statuses say."""

from typing import Any

from apiserver import ApiServer

SQL, LAW, BAD = "hf://org/sql", "hf://org/law", "hf://org/bad"
TOO_LARGE = "rank 64 exceeds --max-lora-rank 16"


def service(name: str = "llama", **fields: Any) -> dict[str, Any]:
    """An InferenceService of two pods."""
    spec = {"model": {"uri": "demo://"}, "runtime": {"device": "cpu"}, "replicas": 2, **fields}
    body = {"apiVersion": "serving.skiff.dev/v1alpha1", "kind": "InferenceService", "spec": spec}
    return {**body, "metadata": {"name": name}}


def adapter(name: str, uri: str, /, **fields: Any) -> dict[str, Any]:
    """A LoRAAdapter of the InferenceService llama."""
    spec = {"modelRef": {"name": "llama"}, "uri": uri, **fields}
    body = {"apiVersion": "serving.skiff.dev/v1alpha1", "kind": "LoRAAdapter", "spec": spec}
    return {**body, "metadata": {"name": name}}


def ready(api: ApiServer, name: str) -> tuple[str, str, str]:
    """Status, reason and message of the condition Ready of a LoRAAdapter; empty before it has one."""
    found = api.get("loraadapters", name)
    status = found.get("status", {})
    if status.get("observedGeneration") != found["metadata"]["generation"]:
        return "", "", ""
    (condition,) = status["conditions"]
    return condition["status"], condition["reason"], condition["message"]


def reported(api: ApiServer) -> dict[str, dict[str, Any]]:
    """The adapters in the status of the InferenceService, by name.

    An adapter is Ready as soon as every pod has it that the operator has seen: a test that made two pods ready waits for
    `loadedPods`, since the operator may see one of them first.
    """
    status = api.get("inferenceservices", "llama").get("status", {})
    return {each["name"]: each for each in status.get("adapters", [])}


def condition(api: ApiServer) -> tuple[str, str]:
    """Status and reason of AdaptersReady; empty without the condition."""
    conditions = api.get("inferenceservices", "llama").get("status", {}).get("conditions", [])
    return next(
        ((each["status"], each["reason"]) for each in conditions if each["type"] == "AdaptersReady"), ("", "")
    )


def template(api: ApiServer) -> Any:
    """The pod template of the Deployment."""
    return api.get("deployments", "llama")["spec"]["template"]
