"""The scale of an InferenceService as the router needs it: whether a pod is expected, and how many pods waiting requests need."""

import math
from dataclasses import dataclass
from typing import Final

MAX_REQUESTED_PODS: Final = 4
"""Maximum number of pods requested for waiting requests; the autoscaler, which sees the load of pods that serve, adds more."""
BYTES_PER_TOKEN: Final = 4
"""A coarse estimate for bodies whose tokens nothing has counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """Desired scale and autoscaling targets of one InferenceService.

    ``replicas``: the desired number of pods. ``max_replicas``: that of autoscaling, 0 without it.

    ``concurrency`` and ``queued_tokens``: autoscaling's targets of the load of a pod, 0 if they are not set.
    ``start_seconds``: time that the last start took, 0 if none is known. ``resource_version``: that of the InferenceService.
    """

    replicas: int
    max_replicas: int = 0
    concurrency: int = 0
    queued_tokens: int = 0
    start_seconds: float = 0.0
    resource_version: str = ""

    @property
    def is_autoscaled(self) -> bool:
        """Return whether the router may scale the service up."""
        return self.max_replicas > 0

    @property
    def is_expected(self) -> bool:
        """Return whether a model without a ready pod will have one."""
        return self.replicas > 0 or self.is_autoscaled

    def needed(self, requests: int, body_bytes: int) -> int:
        """Return the number of pods for requests that wait, with bodies of this size in all."""
        wanted = 1
        if self.concurrency:
            wanted = max(wanted, math.ceil(requests / self.concurrency))
        if self.queued_tokens:
            wanted = max(wanted, math.ceil(body_bytes / BYTES_PER_TOKEN / self.queued_tokens))
        return min(wanted, MAX_REQUESTED_PODS, self.max_replicas)
