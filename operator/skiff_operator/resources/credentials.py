"""Environment of a download: the address of the model's source, and the credentials from a Secret."""

from typing import Any, Final

from skiff_operator.model_uri import ENDPOINTS
from skiff_operator.spec import SecretKey
from skiff_runtime import contract

_TEXTS: Final = {
    "hf": (contract.ENV_HUB_TOKEN, "token"),
    "gs": (contract.ENV_GS_CREDENTIALS, "key.json"),
    "oci": (contract.ENV_OCI_CREDENTIALS, ".dockerconfigjson"),
}
"""Credentials that are one text: the variable, and the default key in the Secret."""
_S3_KEYS: Final = (
    (contract.ENV_S3_KEY_ID, False),
    (contract.ENV_S3_SECRET_KEY, False),
    (contract.ENV_S3_SESSION_TOKEN, True),
)
"""Keys of the Secret of an s3:// model, which are also the variables; the session token may be absent."""


def endpoint(scheme: str, address: str | None) -> list[dict[str, Any]]:
    """Return the variable of `model.endpoint`, which is no secret: server and download find the model under it."""
    return [] if address is None else [{"name": ENDPOINTS[scheme], "value": address}]


def variables(scheme: str, secret: SecretKey | None) -> list[dict[str, Any]]:
    """Return the variables of `model.credentialsSecretRef`, for the download alone."""
    if secret is None:
        return []
    if scheme == "s3":
        return [_variable(name, secret.name, name, optional=optional) for name, optional in _S3_KEYS]
    name, key = _TEXTS[scheme]
    return [_variable(name, secret.name, secret.key or key)]


def _variable(name: str, secret: str, key: str, *, optional: bool = False) -> dict[str, Any]:
    reference: dict[str, Any] = {"name": secret, "key": key}
    if optional:
        reference["optional"] = True
    return {"name": name, "valueFrom": {"secretKeyRef": reference}}
