"""Model URIs: the schemes and their parts. `resources.volumes` decides where files are mounted."""

import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from skiff_operator.errors import InvalidSpec
from skiff_runtime import contract

_FORMS: Final = {
    "demo": re.compile(r"demo://"),
    "s3": re.compile(r"s3://(?P<location>[a-z0-9][a-z0-9._-]{1,61}[a-z0-9])(/(?P<path>.*))?"),
    "gs": re.compile(r"gs://(?P<location>[a-z0-9][a-z0-9._-]{1,61}[a-z0-9])(/(?P<path>.*))?"),
    "oci": re.compile(
        r"oci://(?P<location>[\w.-]+(:[0-9]{1,5})?)/(?P<path>[a-z0-9._/-]+(:[\w.-]{1,128}|@sha256:[0-9a-f]{64})?)"
    ),
    "hf": re.compile(r"hf://(?P<location>[\w.-]+/[\w.-]+(:[A-Za-z0-9][A-Za-z0-9_-]{0,31})?)"),
    "pvc": re.compile(r"pvc://(?P<location>[a-z0-9]([a-z0-9.-]*[a-z0-9])?)(/(?P<path>.*))?"),
    "file": re.compile(r"file://(?P<location>/.+)"),
}
assert tuple(sorted(_FORMS)) == tuple(sorted(contract.MODEL_SCHEMES))

ENDPOINTS: Final = {
    "hf": contract.ENV_HUB_ENDPOINT,
    "s3": contract.ENV_S3_ENDPOINT,
    "gs": contract.ENV_GS_ENDPOINT,
    "oci": contract.ENV_OCI_ENDPOINT,
}
"""The variable with the address of a scheme's source."""
_HELP: Final = (
    "use demo://, hf://ORGANISATION/NAME[:QUANTIZATION], s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, "
    "oci://REGISTRY/REPOSITORY:TAG, pvc://CLAIM/PATH or file:///ABSOLUTE/PATH"
)


class Source(NamedTuple):
    """`location`: the hub's repository, the bucket, the registry, the claim's name or the host's path; `path`: inside it."""

    scheme: str
    location: str = ""
    path: str = ""

    @property
    def is_fetched(self) -> bool:
        """True if an init container downloads the model into the cache."""
        return self.scheme in contract.FETCHED_SCHEMES


def parse(uri: str, *, field: str = "spec.model.uri") -> Source:
    """Split a model URI. Raises `InvalidSpec`, which names `field`, when it has none of the known forms."""
    scheme = uri.partition("://")[0]
    match = _FORMS[scheme].fullmatch(uri) if scheme in _FORMS else None
    if match is None:
        raise InvalidSpec(f"{field}: {uri!r} is not understood; {_HELP}")
    parts = match.groupdict()
    path = (parts.get("path") or "").strip("/")
    if ".." in path.split("/") or ".." in (parts.get("location") or "").split("/"):
        raise InvalidSpec(f"{field}: {uri!r} must not contain '..'; name the directory itself")
    return Source(scheme, parts.get("location") or "", path)


def address(scheme: str, endpoint: str | None, env: Sequence[dict[str, Any]]) -> str | None:
    """Return the address of a model's source, by `endpoint` or else by a container's environment.

    It is empty for the usual one of the scheme, and None if only the pod will know it.
    """
    if endpoint is not None:
        return endpoint.rstrip("/")
    for each in reversed(env):
        if each.get("name") == ENDPOINTS.get(scheme):
            return None if "valueFrom" in each else str(each.get("value", "")).rstrip("/")
    return ""
