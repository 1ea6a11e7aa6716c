"""The principal of a request: which key it carries, and what that key permits."""

import hashlib
from dataclasses import dataclass
from typing import Final

from skiff_runtime.api.http.request_body import Scope
from skiff_runtime.errors import Forbidden, InvalidRequest

_SCOPE: Final = "skiff.principal"


@dataclass(frozen=True, slots=True)
class Principal:
    """``key``: the SHA-256 digest of the API key, b"" without keys; ``admin``: it may act on the requests of others."""

    key: bytes = b""
    admin: bool = False

    def require_admin(self) -> None:
        """Raise ``Forbidden`` unless this principal may act on the requests of others."""
        if not self.admin:
            raise Forbidden(
                "this acts on the requests of others: send an admin key as 'Authorization: Bearer KEY' "
                "(the server takes them by --admin-api-key or --admin-api-key-file; without any, only on loopback)"
            )

    def require_priority(self, priority: int, *, allowed: bool) -> None:
        """Raise ``InvalidRequest`` for a priority before that of others where the server does not allow it."""
        if priority < 0 and not (allowed or self.admin):
            raise InvalidRequest(
                f"'priority' {priority} would run before the requests of others, which this server does not allow "
                "(--allow-priority); send 0 or more, or leave it out",
                param="priority",
                code="priority_not_allowed",
            )


ANONYMOUS: Final = Principal()


def get_principal(scope: Scope) -> Principal:
    """Return the principal that the gate found for a request."""
    principal: Principal = scope.get(_SCOPE, ANONYMOUS)
    return principal


def set_principal(scope: Scope, principal: Principal) -> None:
    """Note the principal of a request."""
    scope[_SCOPE] = principal


def derive_cache_namespace(key: bytes, salt: str | None) -> bytes:
    """Return the namespace of the prefix cache for a key's digest (b"" where keys share) and a client's ``cache_salt``.

    Empty for neither. A digest, so that a client who knows another's salt but not its key cannot name its namespace.
    """
    if not key and salt is None:
        return b""
    text = b"" if salt is None else b"salt:" + salt.encode("utf-8", "surrogatepass")
    return hashlib.sha256(len(key).to_bytes(1) + key + text).digest()
