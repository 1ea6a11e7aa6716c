"""The InferencePool of a service, by which a gateway with an endpoint picker finds its pods."""

from typing import Any

from skiff_operator.kinds import INFERENCE_POOL
from skiff_operator.resources.metadata import child, selector
from skiff_operator.spec import InferencePool, InferenceService
from skiff_runtime import contract


def build(service: InferenceService, pool: InferencePool) -> dict[str, Any]:
    """Build the pool. The endpoint picker is the user's: another pod, behind a Service of the same namespace."""
    picker = pool.endpoint_picker
    return child(
        INFERENCE_POOL,
        service,
        spec={
            "selector": {"matchLabels": selector(service)},
            "targetPorts": [{"number": contract.API_PORT}],
            "endpointPickerRef": {
                "group": "",
                "kind": "Service",
                "name": picker.name or f"{service.name}-epp",
                "port": {"number": picker.port},
                "failureMode": picker.failure_mode,
            },
        },
    )
