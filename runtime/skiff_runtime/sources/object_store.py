"""Client of an object store, S3 and its imitations or Google Cloud Storage, on top of obstore.

obstore (Rust) finds credentials, signs requests and receives; retries, checksums and messages are Skiff's. It has one
type of error for most answers, so the status and the store's error code are read from its text.
"""

import hashlib
import os
import re
import threading
from collections.abc import Iterator
from typing import Any, Final

import obstore
from obstore.exceptions import BaseError, PreconditionError
from obstore.store import GCSStore, S3Store

from skiff_runtime.contract import ENV_GS_CREDENTIALS, ENV_S3_KEY_ID, ENV_S3_SECRET_KEY, ENV_S3_SESSION_TOKEN
from skiff_runtime.errors import FetchError
from skiff_runtime.hub.repository import POOLING_CONFIG
from skiff_runtime.sources.model_source import MAX_FILES, SourceListing
from skiff_runtime.sources.source_reference import ObjectStoreReference
from skiff_runtime.transfer.range_source import RemoteObject, TransientSourceError
from skiff_runtime.transfer.retries import retry

PIECE_BYTES: Final = 1 << 20
_LISTING_PAGE: Final = 1000
_MD5: Final = re.compile(r'"?([0-9a-f]{32})"?')
"""The entity tag of an object that was uploaded in one part; one of several parts has another form, and no checksum."""
_STATUS: Final = re.compile(r"status code: ([0-9]{3})")
_CODE: Final = re.compile(r"<Code>([A-Za-z0-9]{1,64})</Code>")
_TRANSIENT_STATUSES: Final = frozenset({408, 429, 500, 502, 503, 504})
_REFUSED_CODES: Final = frozenset({"ExpiredToken", "InvalidToken", "TokenRefreshRequired"})
"""Codes of S3 for credentials that are not accepted, which come with status 400."""
_UNTRUSTED: Final = re.compile(r"InvalidCertificate\(\s*([A-Za-z]+)")
_CAUSE: Final = re.compile(r'(?:message|error): "([^"]{1,200})"')
"""The reasons of a failed connection, in obstore's description of the error's source."""
_METADATA_SERVICES: Final = (
    "169.254.",
    "metadata.google",
    "sts.amazonaws",
    "oauth2.googleapis",
    "Credentials",
)
_SECRETS: Final = (ENV_S3_KEY_ID, ENV_S3_SECRET_KEY, ENV_S3_SESSION_TOKEN, ENV_GS_CREDENTIALS)
_MESSAGE_CHARACTERS: Final = 200
_CREDENTIALS: Final = {
    "s3": f"set {ENV_S3_KEY_ID} and {ENV_S3_SECRET_KEY}, or a workload identity "
    "(in an InferenceService: model.credentialsSecretRef), or AWS_SKIP_SIGNATURE=true for a public bucket",
    "gs": f"set {ENV_GS_CREDENTIALS} or GOOGLE_APPLICATION_CREDENTIALS, or a workload identity "
    "(in an InferenceService: model.credentialsSecretRef), or GOOGLE_SKIP_SIGNATURE=true for a public bucket",
}
_PERMISSIONS: Final = {
    "s3": "s3:ListBucket on the bucket and s3:GetObject on its objects",
    "gs": "storage.objects.list and storage.objects.get",
}


class ObjectStore:
    """Client of one bucket for the model under one prefix."""

    def __init__(self, reference: ObjectStoreReference) -> None:
        self._reference = reference
        self._stop = threading.Event()
        options: Any = {
            "connect_timeout": "10s",
            "timeout": "60s",
            "allow_http": reference.endpoint.startswith("http://"),
        }
        config: Any = {}
        if reference.endpoint:
            config["endpoint" if reference.scheme == "s3" else "base_url"] = reference.endpoint
        kind: Any = S3Store if reference.scheme == "s3" else GCSStore
        try:
            self._store = kind(
                reference.bucket, config=config, client_options=options, retry_config={"max_retries": 0}
            )
        except (BaseError, ValueError, OSError) as error:
            raise FetchError(
                f"{reference}: the settings of the store are not usable ({_redact(str(error))}); check its variables"
            ) from error

    def list_objects(self) -> SourceListing:
        """Return the objects directly under the prefix, and ``POOLING_CONFIG``. Raises ``FetchError``."""
        found = retry(str(self._reference), self._stop, self._list)
        if not found:
            raise FetchError(
                f"{self._reference} has no objects: check the bucket and the prefix, which names the model's folder"
            )
        files = [each for each in found if "/" not in each.name or POOLING_CONFIG.fullmatch(each.name)]
        digest = hashlib.sha256()
        for each in files:
            digest.update(f"{each.name}\0{each.size_bytes}\0{each.version}\0{each.modified}\n".encode())
        return SourceListing(digest.hexdigest(), files)

    def supports_ranges(self, remote: RemoteObject) -> bool:
        """Return True: every store does."""
        return True

    def stream(self, remote: RemoteObject, start: int, stop: int) -> Iterator[Any]:
        """Yield a range of the object, which must be the one that was listed."""
        options: Any = {"range": (start, stop)}
        if remote.version:
            options["if_match"] = remote.version
        try:
            result = obstore.get(self._store, remote.key, options=options)
            if tuple(result.range) != (start, stop):
                raise FetchError(f"{self._reference}: {remote.name} is shorter than it was listed")
            yield from result.stream(min_chunk_size=PIECE_BYTES)
        except (BaseError, ValueError, OSError) as error:
            raise self._translate(error, remote.name) from error

    def _list(self) -> list[RemoteObject]:
        base = f"{self._reference.prefix}/" if self._reference.prefix else ""
        found: list[RemoteObject] = []
        try:
            pages = obstore.list(self._store, self._reference.prefix or None, chunk_size=_LISTING_PAGE)
            for page in pages:
                for meta in page:
                    if not meta["path"].startswith(base):
                        continue
                    tag = meta["e_tag"] or ""
                    md5 = _MD5.fullmatch(tag)
                    found.append(
                        RemoteObject(
                            name=meta["path"].removeprefix(base),
                            key=meta["path"],
                            size_bytes=meta["size"],
                            digest=f"md5:{md5[1]}" if md5 else "",
                            version=tag,
                            modified=str(meta["last_modified"]),
                        )
                    )
                if len(found) > MAX_FILES:
                    raise FetchError(
                        f"{self._reference} has more than {MAX_FILES} objects; name the model's own folder"
                    )
        except (BaseError, ValueError, OSError) as error:
            raise self._translate(error) from error
        return sorted(found, key=lambda each: each.name)

    def _translate(self, error: Exception, name: str = "") -> FetchError:
        """Return the ``FetchError`` that names the remedy, without credentials."""
        text, _, source = str(error).partition("Debug source")
        status, code = _STATUS.search(text), _CODE.search(text)
        reference, scheme, bucket = str(self._reference), self._reference.scheme, self._reference.bucket
        answer = f"{status[1]}{' ' + code[1] if code else ''}" if status else ""
        if isinstance(error, PreconditionError):
            return FetchError(
                f"{reference}: {name} changed during the download; start again when the upload is over"
            )
        if any(each in text for each in _METADATA_SERVICES) and not code:
            return FetchError(f"{reference}: no credentials were found; {_CREDENTIALS[scheme]}")
        if status and int(status[1]) in _TRANSIENT_STATUSES:
            return TransientSourceError(f"the store answered {answer}")
        if code and code[1] == "NoSuchBucket":
            return FetchError(
                f"{reference}: there is no bucket {bucket} ({answer}); correct the name, or the endpoint"
            )
        # S3 redirects to another region without an address.
        redirected = "redirect without LOCATION" in text
        if scheme == "s3" and (redirected or (code and code[1] == "AuthorizationHeaderMalformed")):
            return FetchError(
                f"{reference}: the bucket is in another region ({answer or 'redirected'}); set AWS_REGION to its region"
            )
        if redirected or "invalid list response" in text:
            return FetchError(
                f"{reference}: the endpoint does not answer like an object store ({_redact(text)}); correct the endpoint"
            )
        if (status and status[1] in ("401", "403")) or (code and code[1] in _REFUSED_CODES):
            return FetchError(
                f"{reference}: access was refused ({answer}); {_CREDENTIALS[scheme]}; the identity needs {_PERMISSIONS[scheme]}"
            )
        if isinstance(error, FileNotFoundError) or (status and status[1] == "404"):
            return FetchError(
                f"{reference}: the store has no {name or 'such bucket or key'} ({answer or 'not found'})"
            )
        if status and status[1] == "416":
            return FetchError(f"{reference}: {name} is shorter than it was listed")
        if isinstance(error, BaseError) and not status:
            return TransientSourceError(
                f"no answer from the store ({_find_cause(source) or _redact(text)}); check the network and the endpoint"
            )
        return FetchError(f"{reference}: {_redact(text)}")


def _find_cause(source: str) -> str:
    """Return the reason of a failed connection from obstore's description of it; empty if it has none."""
    if untrusted := _UNTRUSTED.search(source):
        return f"invalid certificate: {untrusted[1]}"
    found = _CAUSE.findall(source)
    return _redact(found[-1]) if found else ""


def _redact(text: str) -> str:
    """Return the first line of a message, without the values of credentials and the queries of addresses."""
    line = text.partition("\n")[0]
    for variable in _SECRETS:
        if secret := os.environ.get(variable, ""):
            line = line.replace(secret, "***")
    return re.sub(r"\?[^\s)]*", "", line)[:_MESSAGE_CHARACTERS]
