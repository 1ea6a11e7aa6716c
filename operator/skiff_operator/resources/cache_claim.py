"""The PersistentVolumeClaim behind `cache.size`: downloaded weights that outlive every pod."""

from typing import Any

from skiff_operator.kinds import CLAIM
from skiff_operator.resources.metadata import child
from skiff_operator.spec import InferenceService


def name(service: InferenceService) -> str:
    """The claim's name."""
    return f"{service.name}-cache"


def build(service: InferenceService) -> dict[str, Any]:
    """ReadWriteOnce, which every storage class offers; the pods are kept on the volume's node for it."""
    return child(
        CLAIM,
        service,
        name=name(service),
        spec={
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": str(service.spec.cache.size)}},
        },
    )
