"""The HTTPRoute that leads requests of a Gateway to a service's InferencePool."""

from typing import Any

from skiff_operator.kinds import HTTP_ROUTE, INFERENCE_POOL
from skiff_operator.resources.metadata import child
from skiff_operator.spec import HttpRoute, InferenceService, ParentRef, explicit


def build(service: InferenceService, route: HttpRoute) -> dict[str, Any]:
    """Build the route of all paths. It has no time limit, because an answer may take minutes; pods have limits of their own."""
    return child(
        HTTP_ROUTE,
        service,
        spec={
            "parentRefs": [_parent(each) for each in route.parent_refs],
            **({"hostnames": list(route.hostnames)} if route.hostnames else {}),
            "rules": [
                {
                    "matches": [{"path": {"type": "PathPrefix", "value": "/"}}],
                    "backendRefs": [
                        {"group": INFERENCE_POOL.group, "kind": INFERENCE_POOL.name, "name": service.name}
                    ],
                    "timeouts": {"request": "0s"},
                }
            ],
        },
    )


def _parent(parent: ParentRef) -> dict[str, Any]:
    return {"group": HTTP_ROUTE.group, "kind": "Gateway", **explicit(parent)}
