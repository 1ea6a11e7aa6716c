"""The ServiceAccount of the serving pods: an identity of their own, with no token and no rights."""

from typing import Any

from skiff_operator.kinds import SERVICE_ACCOUNT
from skiff_operator.resources.metadata import child
from skiff_operator.spec import InferenceService


def build(service: InferenceService) -> dict[str, Any]:
    """Pull secrets or cloud identities that a user adds to it stay: server-side apply owns only these fields."""
    return child(SERVICE_ACCOUNT, service, automountServiceAccountToken=False)
