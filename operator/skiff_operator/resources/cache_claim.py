"""The PersistentVolumeClaim behind `cache.size`: downloaded weights that outlive every pod."""

from typing import Any

from skiff_operator.kinds import CLAIM
from skiff_operator.resources.metadata import child
from skiff_operator.spec import InferenceService


def name(service: InferenceService) -> str:
    """Return the name of the claim."""
    return f"{service.name}-cache"


def build(service: InferenceService) -> dict[str, Any]:
    """Build the claim: ReadWriteOnce, which every storage class offers, so pods are scheduled to the volume's node."""
    return child(
        CLAIM,
        service,
        name=name(service),
        spec={
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": str(service.spec.cache.size)}},
        },
    )
