"""Authentication and authorization: API keys, admin keys, and the principal of a request."""

import hashlib
import re
from dataclasses import dataclass
from typing import Final, Self

from skiff_runtime import contract
from skiff_runtime.api.http.allowed_hosts import AllowedHosts, is_loopback
from skiff_runtime.api.http.asgi import Headers, Scope
from skiff_runtime.api.http.cors import CorsPolicy
from skiff_runtime.api.http.key_file import KeyFile
from skiff_runtime.api.http.request_headers import get_header
from skiff_runtime.config import Config
from skiff_runtime.config.api_keys import KeyRing
from skiff_runtime.errors import Forbidden, InvalidRequest, Unauthorized

PROBE_PATHS: Final = frozenset(
    {
        contract.PATH_LIVEZ,
        contract.PATH_READYZ,
        contract.PATH_STARTUPZ,
        contract.PATH_HEALTH_GENERATE,
        contract.PATH_HEALTH,
        contract.PATH_PING,
        contract.PATH_METRICS,
        contract.PATH_EVENTS,
    }
)
"""Served without a key, and on connections beyond the limit, for kubelets, scrapers and routers."""
STATIC_PATHS: Final = frozenset({contract.PATH_HOME, contract.PATH_OPENAPI, contract.PATH_DOCS})
"""Served without a key too: they are the same in every Skiff, and a browser sends no key for them."""
_BEARER: Final = re.compile(rb"[Bb][Ee][Aa][Rr][Ee][Rr] +(\S+)")
_SCOPE_KEY: Final = "skiff.principal"


@dataclass(frozen=True, slots=True)
class Principal:
    """The sender of a request, as far as authentication identifies it.

    ``key``: SHA-256 digest of its API key, b"" without keys. ``admin``: it may act on the requests of others.
    """

    key: bytes = b""
    admin: bool = False

    def require_admin(self) -> None:
        """Raise ``Forbidden`` unless this principal may act on the requests of others."""
        if not self.admin:
            raise Forbidden(
                "this acts on the requests of others: send an admin key as 'Authorization: Bearer KEY' "
                "(set with --admin-api-key, --admin-api-key-file or --admin-api-key-sha256; without admin keys it is allowed on loopback only)"
            )

    def require_priority(self, priority: int, *, allowed: bool) -> None:
        """Raise ``InvalidRequest`` for a priority above the default where the server does not allow it."""
        if priority < 0 and not (allowed or self.admin):
            raise InvalidRequest(
                f"'priority' {priority} would run before the requests of others, which this server does not allow "
                "(--allow-priority); send 0 or more, or leave it out",
                param="priority",
                code="priority_not_allowed",
            )


ANONYMOUS: Final = Principal()


def get_principal(scope: Scope) -> Principal:
    """Return the principal that authorization found for a request."""
    principal: Principal = scope.get(_SCOPE_KEY, ANONYMOUS)
    return principal


def set_principal(scope: Scope, principal: Principal) -> None:
    """Store the principal of a request."""
    scope[_SCOPE_KEY] = principal


def derive_cache_namespace(key: bytes, salt: str | None) -> bytes:
    """Return the namespace of the prefix cache for a key's digest (b"" if keys share one) and a client's ``cache_salt``.

    Returns b"" if there is neither. The namespace is a digest, so that a client that knows another's salt but not its
    key cannot reach its namespace.
    """
    if not key and salt is None:
        return b""
    text = b"" if salt is None else b"salt:" + salt.encode("utf-8", "surrogatepass")
    return hashlib.sha256(len(key).to_bytes(1) + key + text).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessPolicy:
    """Access control of one service, from a request's headers to its principal or to an error.

    ``keys`` give access to the API, ``admin_keys`` also to operations on the requests of others. ``hosts``: None if any
    Host header is accepted. ``keyless``: the principal of a request without a key, made once; an
    admin where there are no admin keys and only this machine can connect. ``key_files`` refill the rings.
    ``probe_paths`` are served without a key, and on connections beyond the limit.
    """

    keys: KeyRing
    admin_keys: KeyRing
    cors: CorsPolicy
    hosts: AllowedHosts | None
    keyless: Principal
    key_files: tuple[KeyFile, ...] = ()
    probe_paths: frozenset[str] = PROBE_PATHS

    @classmethod
    def from_config(cls, config: Config) -> Self:
        """Return the policy of a resolved configuration, with the keys that its key files contain now.

        Raises:
            ConfigError: a key file has changed since it was checked, and cannot be used.
        """
        loopback = is_loopback(config.host)
        keys, key_file = _load(config.api_key_file, "--api-key-file", config.api_key)
        admin_keys, admin_key_file = _load(
            config.admin_api_key_file,
            "--admin-api-key-file",
            config.admin_api_key,
            digests=config.admin_api_key_sha256,
        )
        return cls(
            keys=keys,
            admin_keys=admin_keys,
            cors=CorsPolicy(config.allowed_origins),
            hosts=AllowedHosts(config.allowed_hosts) if loopback and not keys else None,
            keyless=Principal(admin=loopback and not admin_keys),
            key_files=tuple(file for file in (key_file, admin_key_file) if file is not None),
        )

    def authorize(self, scope: Scope) -> Principal:
        """Return the principal of a request.

        Raises:
            HostRefused: The server runs on loopback without keys, and the request names another host.
            OriginRefused: The server has no keys, and a page of another origin requests more than a read. With keys,
                any origin may send requests, because a page has no key unless its user enters one.
            Unauthorized: A key is required, and the request has none or an unknown one.
        """
        headers = scope["headers"]
        if self.hosts is not None:
            self.hosts.check(headers)
        if self.admin_keys:
            digest = self.admin_keys.find(get_key(headers))
            if digest is not None:
                return Principal(digest, admin=True)
        if not self.keys:
            self.cors.check_origin(scope)
            return self.keyless
        if scope["path"] in self.probe_paths or scope["path"] in STATIC_PATHS:
            return Principal()
        return Principal(self._authenticate(headers), admin=self.keyless.admin)

    def _authenticate(self, headers: Headers) -> bytes:
        """Return the digest of the request's key, which must be known."""
        token = get_key(headers)
        if not token:
            raise Unauthorized(
                "an API key is required: send the header 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
            )
        digest = self.keys.find(token)
        if digest is None:
            raise Unauthorized("the API key is not known here; ask the service's owner for one")
        return digest


def _load(
    path: str | None, flag: str, given: tuple[str, ...], *, digests: tuple[str, ...] = ()
) -> tuple[KeyRing, KeyFile | None]:
    """Return the ring of the given keys and of the keys with these digests, filled up from the file at ``path`` if there is one."""
    if path is None:
        return KeyRing(given, digests), None
    file = KeyFile(path, flag, given=given, digests=digests)
    return file.ring, file


def get_key(headers: Headers) -> bytes:
    """Return the key in the Authorization header, else in x-api-key, the header of Anthropic's clients.

    Returns b"", which no key ring contains, if there is none.
    """
    authorization = get_header(headers, b"authorization")
    if not authorization:
        return get_header(headers, b"x-api-key")
    match = _BEARER.fullmatch(authorization)
    return match.group(1) if match else b""
