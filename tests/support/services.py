"""InferenceServices for tests: raw objects as the API server would send them, and their parsed form."""

from typing import Any

from skiff_operator import spec
from skiff_operator.spec import InferenceService


def raw(name: str = "llama", *, namespace: str = "default", uid: str = "u1", **fields: Any) -> dict[str, Any]:
    """The object with `fields` as its spec; by default the demo model."""
    return {
        "apiVersion": "serving.skiff.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": uid,
            "generation": 1,
            "resourceVersion": "1",
        },
        "spec": {"model": {"uri": "demo://"}, **fields},
    }


def service(name: str = "llama", **fields: Any) -> InferenceService:
    """Its parsed form."""
    return spec.parse(raw(name, **fields))


def hub(**model: Any) -> dict[str, Any]:
    """The `model` of a service that downloads its weights."""
    return {"uri": "hf://meta-llama/Llama-3.1-8B-Instruct", **model}
