"""The ConfigMap from which pods with LoRA take what changes without another pod template.

Those are the digest of the operator's admin key, and the adapters that a pod loads before it is ready. The kubelet reads it
at each start of a container, and starts none before it exists.
"""

from collections.abc import Sequence
from typing import Any, Final

from skiff_operator.kinds import CONFIG_MAP
from skiff_operator.resources.metadata import child
from skiff_operator.spec import Adapter, InferenceService
from skiff_runtime import contract

KEY_DIGEST: Final = "adminKeySha256"
ADAPTERS: Final = "adapters"


def name(service: str) -> str:
    """Return the name of the ConfigMap. A dot is in the name of no InferenceService."""
    return f"{service}.lora"


def variables(service: InferenceService) -> list[dict[str, Any]]:
    """Return the variables of the serving container; none without LoRA."""
    if service.spec.lora is None:
        return []
    reference = {"name": name(service.name)}
    digest = {"configMapKeyRef": {**reference, "key": KEY_DIGEST}}
    adapters = {"configMapKeyRef": {**reference, "key": ADAPTERS, "optional": True}}
    return [
        {"name": contract.ENV_ADMIN_KEY_DIGEST, "valueFrom": digest},
        {"name": contract.ENV_LORA, "valueFrom": adapters},
    ]


def build(service: InferenceService, key_digest: str, adapters: Sequence[Adapter]) -> dict[str, Any]:
    """Build the ConfigMap. `adapters`: their URIs are those that the pods understand."""
    data = {KEY_DIGEST: key_digest}
    if adapters:
        data[ADAPTERS] = ",".join(f"{each.name}={each.uri}" for each in adapters)
    return child(CONFIG_MAP, service, name=name(service.name), data=data)


def read(obj: dict[str, Any]) -> tuple[str, tuple[Adapter, ...]]:
    """Return the digest and the adapters of a live ConfigMap; others may have written anything."""
    data = obj.get("data") or {}
    pairs = [text.partition("=") for text in data.get(ADAPTERS, "").split(",") if "=" in text]
    return data.get(KEY_DIGEST, ""), tuple(Adapter(name=each[0], uri=each[2]) for each in pairs)
