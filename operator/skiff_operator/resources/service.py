"""The ClusterIP Service in front of the pods."""

from typing import Any, Final

from skiff_operator.kinds import SERVICE
from skiff_operator.resources.metadata import child, selector
from skiff_operator.spec import InferenceService
from skiff_runtime import contract

PORT: Final = 80


def build(service: InferenceService) -> dict[str, Any]:
    """Build the Service, on port 80 so that clients need only its name."""
    return child(
        SERVICE,
        service,
        spec={
            "type": "ClusterIP",
            "selector": selector(service),
            "ports": [
                {
                    "name": contract.API_PORT_NAME,
                    "port": PORT,
                    "targetPort": contract.API_PORT_NAME,
                    "protocol": "TCP",
                }
            ],
        },
    )


def url(namespace: str, name: str) -> str:
    """Return the base URL for clients inside the cluster."""
    return f"http://{name}.{namespace}.svc/v1"
