"""The cost of deleting a pod, by which a scale-in takes the pods that have the least to lose. Pure.

A ReplicaSet deletes pods without a node first, then those that are not ready, then those of the lowest
`pod-deletion-cost`. So a pod that loads its model goes before one that serves in any case, and the cost decides among
the pods that serve: first by their requests, which would have to end within the drain's limit, then by the prefixes in
their KV caches, which requests would have to compute again elsewhere.
"""

import math
from typing import Final

from skiff_operator.metrics_page import samples
from skiff_runtime import contract

ANNOTATION: Final = "controller.kubernetes.io/pod-deletion-cost"

_REQUEST_COST: Final = 1000
_MAX_REQUESTS: Final = 1_000_000
_FREE_PAGES: Final = f'{contract.METRIC_KV_CACHE_PAGES}{{state="free"}}'
_PAGES: Final = f"{contract.METRIC_KV_CACHE_PAGES}{{"


def from_metrics(page: str) -> int | None:
    """Return the cost of a pod from its page of metrics; None if the page has no count of requests.

    One request costs more than any cache: 1000 for each, and up to 999 for the fraction of the KV cache that is filled.
    """
    requests: float | None = None
    total = free = 0.0
    for series, value in samples(page):
        if series == contract.METRIC_IN_FLIGHT:
            requests = value
        elif series.startswith(_PAGES):
            total += value
            free += value if series == _FREE_PAGES else 0.0
    if requests is None:
        return None
    warmth = math.ceil(999 * (total - free) / total) if total else 0
    return int(min(requests, _MAX_REQUESTS)) * _REQUEST_COST + warmth
