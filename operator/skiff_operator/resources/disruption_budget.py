"""The PodDisruptionBudget of a service with more than one replica: evictions take one pod at a time."""

from typing import Any

from skiff_operator.kinds import DISRUPTION_BUDGET
from skiff_operator.resources.metadata import child, selector
from skiff_operator.spec import InferenceService


def build(service: InferenceService) -> dict[str, Any]:
    """Build the budget. Unready pods may always be evicted: they serve no requests and would block a node drain."""
    return child(
        DISRUPTION_BUDGET,
        service,
        spec={
            "maxUnavailable": 1,
            "selector": {"matchLabels": selector(service)},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    )
