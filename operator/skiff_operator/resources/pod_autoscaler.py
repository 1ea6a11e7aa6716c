"""The autoscaling objects of other engines: a HorizontalPodAutoscaler, or KEDA's ScaledObject.

Both write the number of pods by the subresource `scale` of the InferenceService, as the operator's own autoscaler does. The
HorizontalPodAutoscaler reads gauges of the pods through an adapter for custom metrics; KEDA asks Prometheus, with the
labels that the chart's PodMonitor gives.
"""

from typing import Any, Final

from skiff_operator.kinds import INFERENCE_SERVICE, POD_AUTOSCALER, SCALED_OBJECT
from skiff_operator.resources.metadata import child
from skiff_operator.settings import Settings
from skiff_operator.spec import Autoscaling, InferenceService
from skiff_runtime import contract

_ACTIVITY_THRESHOLD: Final = 100_000
"""A threshold high enough that the trigger keeps one pod active and never adds another."""


def build(service: InferenceService, autoscaling: Autoscaling, settings: Settings) -> dict[str, Any]:
    """Build the object of the engine, which is not Builtin."""
    if autoscaling.engine == "HPA":
        return _pod_autoscaler(service, autoscaling)
    return _scaled_object(service, autoscaling, settings)


def _pod_autoscaler(service: InferenceService, autoscaling: Autoscaling) -> dict[str, Any]:
    targets = autoscaling.targets
    gauges = (
        (contract.METRIC_IN_FLIGHT, _thousandths(targets.concurrency, 1000)),
        (contract.METRIC_QUEUED_TOKENS, _thousandths(targets.queued_tokens, 1000)),
        (contract.METRIC_KV_CACHE_USAGE, _thousandths(targets.kv_cache_utilization, 10)),
    )
    return child(
        POD_AUTOSCALER,
        service,
        spec={
            "scaleTargetRef": _target(service),
            "minReplicas": autoscaling.min_replicas,
            "maxReplicas": autoscaling.max_replicas,
            "metrics": [
                {
                    "type": "Pods",
                    "pods": {
                        "metric": {"name": name},
                        "target": {"type": "AverageValue", "averageValue": quantity},
                    },
                }
                for name, quantity in gauges
                if quantity
            ],
            "behavior": _behavior(autoscaling),
        },
    )


def _scaled_object(service: InferenceService, autoscaling: Autoscaling, settings: Settings) -> dict[str, Any]:
    return child(
        SCALED_OBJECT,
        service,
        spec={
            "scaleTargetRef": _target(service),
            "minReplicaCount": autoscaling.min_replicas,
            "maxReplicaCount": autoscaling.max_replicas,
            "cooldownPeriod": autoscaling.idle_seconds,
            "advanced": {"horizontalPodAutoscalerConfig": {"behavior": _behavior(autoscaling)}},
            "triggers": [
                {
                    "type": "prometheus",
                    "name": name,
                    "metricType": metric_type,
                    "metadata": {
                        "serverAddress": settings.prometheus_address,
                        "query": query,
                        "threshold": threshold,
                    },
                }
                for name, metric_type, query, threshold in _queries(service, autoscaling)
            ],
        },
    )


def _queries(service: InferenceService, autoscaling: Autoscaling) -> list[tuple[str, str, str, str]]:
    """Return name, type, query and threshold of each target's trigger."""
    targets = autoscaling.targets
    pods = f'{{namespace="{service.namespace}",inferenceservice="{service.name}"}}'
    ttft = contract.METRIC_TTFT
    rates = f"sum(rate({ttft}_sum{pods}[1m])) / sum(rate({ttft}_count{pods}[1m]))"
    found: list[tuple[str, str, str, float | None]] = [
        ("concurrency", "AverageValue", f"sum({contract.METRIC_IN_FLIGHT}{pods})", targets.concurrency),
        (
            "queued-tokens",
            "AverageValue",
            f"sum({contract.METRIC_QUEUED_TOKENS}{pods})",
            targets.queued_tokens,
        ),
        (
            "kv-cache-utilization",
            "AverageValue",
            f"100 * sum({contract.METRIC_KV_CACHE_USAGE}{pods})",
            targets.kv_cache_utilization,
        ),
        # No request within a minute makes it 0 / 0, which is not above 0 either.
        ("ttft-seconds", "Value", f"({rates} > 0) or vector(0)", targets.ttft_seconds),
    ]
    if autoscaling.min_replicas == 0:
        found.append(("activity", "AverageValue", _activity(service, pods), _ACTIVITY_THRESHOLD))
    return [(name, kind, query, f"{value:g}") for name, kind, query, value in found if value is not None]


def _activity(service: InferenceService, pods: str) -> str:
    """Return a query that is above 0 while the service is in use: requests wait in a router, run, or ended within a minute.

    KEDA removes the last pod when no trigger has been active for the cooldown. Without this one, it would remove a pod that a
    router has asked for, because a pod that loads has no metrics yet, and a pod whose requests are too short for a scrape to
    find one in flight. Routers know their models by name, so requests for another service with the same name count as well.
    """
    terms = (
        f'max_over_time({contract.ROUTER_METRIC_WAITING}{{model="{service.model_name}"}}[1m])',
        f"max_over_time({contract.METRIC_IN_FLIGHT}{pods}[1m])",
        f"increase({contract.METRIC_REQUESTS}{pods}[1m])",
    )
    return " + ".join(f"(sum({term}) or vector(0))" for term in terms)


def _target(service: InferenceService) -> dict[str, str]:
    return {
        "apiVersion": INFERENCE_SERVICE.api_version,
        "kind": INFERENCE_SERVICE.name,
        "name": service.name,
    }


def _behavior(autoscaling: Autoscaling) -> dict[str, Any]:
    return {"scaleDown": {"stabilizationWindowSeconds": autoscaling.scale_down_delay_seconds}}


def _thousandths(value: int | None, unit: int) -> str:
    """Return a target as a quantity in the form in which the API server stores it; empty without one."""
    if value is None:
        return ""
    whole, rest = divmod(value * unit, 1000)
    return f"{value * unit}m" if rest else str(whole)
