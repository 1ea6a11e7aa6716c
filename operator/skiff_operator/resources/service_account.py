"""The ServiceAccount of the serving pods: an identity without token and rights."""

from typing import Any

from skiff_operator.kinds import SERVICE_ACCOUNT
from skiff_operator.resources.metadata import child
from skiff_operator.spec import InferenceService


def build(service: InferenceService) -> dict[str, Any]:
    """Build the ServiceAccount. Pull secrets and cloud identities that users add stay: apply owns only these fields."""
    return child(SERVICE_ACCOUNT, service, automountServiceAccountToken=False)
