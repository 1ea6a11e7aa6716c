"""Access control of one service: from a request's headers to its principal, or to a refusal."""

import re
from dataclasses import dataclass, field
from typing import Final, Self

from skiff_runtime import contract
from skiff_runtime.api.http.allowed_hosts import AllowedHosts, is_loopback
from skiff_runtime.api.http.asgi import Headers
from skiff_runtime.api.http.cors import CorsPolicy
from skiff_runtime.api.http.request_body import Scope, get_header
from skiff_runtime.api.principal import Principal
from skiff_runtime.config import Config
from skiff_runtime.config.api_keys import KeyRing
from skiff_runtime.errors import Unauthorized

PROBE_PATHS: Final = frozenset(
    {
        contract.PATH_LIVEZ,
        contract.PATH_READYZ,
        contract.PATH_STARTUPZ,
        contract.PATH_HEALTH_GENERATE,
        contract.PATH_METRICS,
    }
)
"""Served without a key and on connections beyond the limit: kubelets, scrapers and routers ask for them."""
DOCS_PATHS: Final = frozenset({contract.PATH_OPENAPI, contract.PATH_DOCS})
"""Served without a key, too: they tell what every Skiff serves, and a browser sends no key."""
UNAUTHENTICATED_PATHS: Final = PROBE_PATHS | DOCS_PATHS
_BEARER: Final = re.compile(rb"[Bb][Ee][Aa][Rr][Ee][Rr] +(\S+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessPolicy:
    """``keys`` open the API, ``admin_keys`` also what acts on the requests of others.

    ``hosts``: None where any Host header is accepted. ``everyone_is_admin``: there are no admin keys, and only this
    machine can connect.
    """

    keys: KeyRing
    admin_keys: KeyRing
    origins: CorsPolicy
    hosts: AllowedHosts | None
    everyone_is_admin: bool
    _keyless: Principal = field(init=False)
    """Made once: the principal of every request where keys are not wanted."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_keyless", Principal(admin=self.everyone_is_admin))

    @classmethod
    def of(cls, config: Config) -> Self:
        """Return what a resolved configuration asks for."""
        loopback = is_loopback(config.host)
        return cls(
            keys=KeyRing(config.api_key),
            admin_keys=KeyRing(config.admin_api_key),
            origins=CorsPolicy(config.allowed_origins),
            hosts=AllowedHosts(config.allowed_hosts) if loopback and not config.api_key else None,
            everyone_is_admin=loopback and not config.admin_api_key,
        )

    def check(self, scope: Scope) -> Principal:
        """Return the principal of a request.

        Raises:
            HostRefused: it addresses a server without keys on loopback by a foreign name.
            OriginRefused: without keys, a page of another origin wants something done. A key is what no page has of
                itself, so with keys any origin may ask.
            Unauthorized: a key is needed, and there is none or it is not known.
        """
        headers = scope["headers"]
        if self.hosts is not None:
            self.hosts.check(headers)
        if self.admin_keys:
            digest = self.admin_keys.find(_bearer(headers))
            if digest is not None:
                return Principal(digest, admin=True)
        if not self.keys:
            self.origins.check(scope)
            return self._keyless
        if scope["path"] in UNAUTHENTICATED_PATHS:
            return Principal()
        return Principal(self._key(headers), admin=self.everyone_is_admin)

    def _key(self, headers: Headers) -> bytes:
        """Return the digest of the request's key, which must be known."""
        given = _bearer(headers)
        if not given:
            raise Unauthorized("an API key is needed: send the header 'Authorization: Bearer KEY'")
        digest = self.keys.find(given)
        if digest is None:
            raise Unauthorized("the API key is not known here; ask the service's owner for one")
        return digest


def _bearer(headers: Headers) -> bytes:
    """Return the key in the Authorization header; empty where there is none, which no ring of keys has."""
    given = _BEARER.fullmatch(get_header(headers, b"authorization"))
    return given.group(1) if given else b""
