"""References to models outside of a hub: ``s3://``, ``gs://`` and ``oci://`` URIs."""

import hashlib
import os
import re
from dataclasses import dataclass
from typing import Final

from skiff_runtime.contract import ENV_GS_ENDPOINT, ENV_OCI_ENDPOINT, ENV_S3_ENDPOINT
from skiff_runtime.errors import ConfigError

OBJECT_STORE_SCHEMES: Final = ("s3", "gs")
REGISTRY_SCHEME: Final = "oci"
_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]")
_REGISTRY: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?(?::[0-9]{1,5})?")
_REPOSITORY: Final = re.compile(
    r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)*"
)
_TAG: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")
_DEFAULT_TAG: Final = "latest"
_READABLE_CHARACTERS: Final = 80
_ENDPOINT_VARIABLES: Final = {"s3": ENV_S3_ENDPOINT, "gs": ENV_GS_ENDPOINT, "oci": ENV_OCI_ENDPOINT}


@dataclass(frozen=True, slots=True)
class ObjectStoreReference:
    """The objects of a bucket under a prefix. ``endpoint``: the address of a service other than the scheme's own, or ""."""

    scheme: str
    bucket: str
    prefix: str
    endpoint: str = ""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.prefix}".rstrip("/")


@dataclass(frozen=True, slots=True)
class RegistryReference:
    """An artifact of a registry. ``version``: a tag or a digest. ``endpoint``: the registry's address if not https, or ""."""

    registry: str
    repository: str
    version: str
    endpoint: str = ""
    scheme: str = REGISTRY_SCHEME

    @property
    def is_pinned(self) -> bool:
        """True if the version is a digest, which always names the same files."""
        return _DIGEST.fullmatch(self.version) is not None

    def __str__(self) -> str:
        return f"oci://{self.registry}/{self.repository}{'@' if self.is_pinned else ':'}{self.version}"


SourceReference = ObjectStoreReference | RegistryReference


def is_source_uri(uri: str) -> bool:
    """Return whether ``uri`` has one of the schemes of this package."""
    return uri.partition("://")[0] in (*OBJECT_STORE_SCHEMES, REGISTRY_SCHEME) and "://" in uri


def parse_source(uri: str) -> SourceReference:
    """Parse ``s3://bucket/prefix``, ``gs://bucket/prefix`` or ``oci://registry/repository:tag`` (or ``@sha256:...``).

    The endpoint is read from AWS_ENDPOINT_URL, GOOGLE_BASE_URL or OCI_ENDPOINT. Raises ``ConfigError`` if any of them is malformed.
    """
    scheme, _, rest = uri.partition("://")
    variable = _ENDPOINT_VARIABLES[scheme]
    endpoint = os.environ.get(variable, "").rstrip("/")
    if endpoint and not re.fullmatch(r"https?://[A-Za-z0-9.\[\]:_-]+(/[^\s?#@]*)?", endpoint):
        raise ConfigError(f"{variable} must be an http:// or https:// address without user and password")
    if scheme == REGISTRY_SCHEME:
        return _parse_registry(uri, rest, endpoint)
    bucket, _, prefix = rest.partition("/")
    prefix = prefix.strip("/")
    if not _BUCKET.fullmatch(bucket) or not prefix.isprintable() or not _is_path(prefix):
        raise ConfigError(
            f"{uri!r} is not a prefix of a bucket; write {scheme}://BUCKET/PREFIX, as in {scheme}://models/llama/8b"
        )
    return ObjectStoreReference(scheme, bucket, prefix, endpoint)


def directory_name(reference: SourceReference) -> str:
    """Return the name of the model's directory in the cache: readable, and unique by a hash of everything that it names."""
    identity = f"{reference.endpoint} {reference}"
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", str(reference).replace("://", "--"))[:_READABLE_CHARACTERS]
    return f"skiff--{readable}--{hashlib.sha256(identity.encode()).hexdigest()[:12]}"


def _parse_registry(uri: str, rest: str, endpoint: str) -> RegistryReference:
    registry, _, remainder = rest.partition("/")
    repository, separator, version = remainder.partition("@")
    if not separator:
        repository, _, version = remainder.partition(":")
        version = version or _DEFAULT_TAG
    pattern = _DIGEST if separator else _TAG
    if (
        not _REGISTRY.fullmatch(registry)
        or not _REPOSITORY.fullmatch(repository)
        or not pattern.fullmatch(version)
    ):
        raise ConfigError(
            f"{uri!r} is not an artifact of a registry; write oci://REGISTRY/REPOSITORY:TAG or "
            "oci://REGISTRY/REPOSITORY@sha256:DIGEST, as in oci://ghcr.io/org/model:v1"
        )
    return RegistryReference(registry, repository, version, endpoint)


def _is_path(prefix: str) -> bool:
    return not prefix or all(part not in ("", ".", "..") for part in prefix.split("/"))
