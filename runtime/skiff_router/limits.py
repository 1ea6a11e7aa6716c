"""Limits for each API key on requests and tokens a minute, and on concurrency.

Keys of one name share its limits, so that a key may be rotated. A minute's amount refills steadily, so a key that was idle may
use up to one minute's amount at once. The tokens of a request are known at its end: at its start its prompt is estimated from
the size of its body, and the difference is settled then. What a request takes beyond the amount is a debt that delays later
ones, so in the long run the limit holds exactly, and no request is too large to be served at all.

Routers that are peers share the limits (`peers`). Each reports the total that its own requests have taken, and its peers take the
difference to its last report from their buckets. All buckets agree once every router has the last report of every other one, in
whatever order the reports came. A total that is reported for the first time may be old, and a part of it refilled since. In that
case a router lowers its buckets to what is left at the peer, if that is less.
"""

import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final, TypeVar

import msgspec

from skiff_runtime.config.api_keys import MAX_API_KEYS
from skiff_runtime.errors import ConfigError, RequestError

MAX_FILE_BYTES: Final = 1 << 20
BYTES_PER_TOKEN: Final = 4
"""Bytes per token assumed for a prompt before its tokens are known; close to English text."""
BUSY_RETRY_SECONDS: Final = 1
"""Retry-After where the concurrency is exhausted: no bucket says when a request will end."""
_MINUTE: Final = 60.0
StructT = TypeVar("StructT", bound=msgspec.Struct)

_Amount = Annotated[int, msgspec.Meta(ge=1, le=10**12)]
_Field = _Amount | None | msgspec.UnsetType


def estimate_prompt(body_bytes: int) -> int:
    """Return the tokens of a prompt as the size of its request's body suggests."""
    return body_bytes // BYTES_PER_TOKEN


class RateLimited(RequestError):
    """The request's API key has used up one of its limits."""

    status = 429
    kind = "rate_limit_error"
    code = "rate_limit_exceeded"

    def __init__(self, limit: str, message: str, *, retry_after_seconds: int) -> None:
        """``limit``: its name in the file of limits."""
        super().__init__(message, retry_after_seconds=retry_after_seconds)
        self.limit = limit


class KeyLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """The limits of one key as the limits file has them. A missing field takes the default's value; null means unlimited."""

    requests_per_minute: _Field = msgspec.UNSET
    tokens_per_minute: _Field = msgspec.UNSET
    concurrency: _Field = msgspec.UNSET

    def with_defaults(self, default: "KeyLimits") -> "KeyLimits":
        """Return these limits, with those of ``default`` for the fields that are left out."""
        fields = {
            name: getattr(default if getattr(self, name) is msgspec.UNSET else self, name)
            for name in self.__struct_fields__
        }
        return KeyLimits(**fields)


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of all keys: those of a name in ``keys``, and of all others ``default``."""

    default: KeyLimits = KeyLimits()
    keys: dict[str, KeyLimits] = field(default_factory=dict)

    def for_key(self, name: str) -> KeyLimits:
        """Return the limits of a key's name."""
        return self.keys.get(name, self.default)


class _File(msgspec.Struct, forbid_unknown_fields=True):
    default: msgspec.Raw = msgspec.Raw(b"{}")
    keys: dict[str, msgspec.Raw] = {}


def read_limits(path: str, flag: str) -> Limits:
    """Return the limits in the JSON file that ``flag`` names.

    The file is ``{"default": {"requestsPerMinute", "tokensPerMinute", "concurrency"}, "keys": {NAME: {...}}}``.

    Raises:
        ConfigError: The file cannot be read, or a field of it is unknown or not a number from 1; the message names it.
    """
    source = f"{flag} {path}"
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{source} cannot be read: {error}") from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{source} has more than {MAX_FILE_BYTES} bytes")
    parsed = _decode(data, _File, source)
    if len(parsed.keys) > MAX_API_KEYS:
        raise ConfigError(f"{source}: 'keys' has {len(parsed.keys)} names; give at most {MAX_API_KEYS}")
    default = _decode(parsed.default, KeyLimits, f"{source}: 'default'")
    keys = {
        name: _decode(raw, KeyLimits, f"{source}: 'keys.{name}'").with_defaults(default)
        for name, raw in parsed.keys.items()
    }
    return Limits(default, keys)


def _decode(data: bytes | msgspec.Raw, kind: type[StructT], source: str) -> StructT:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:  # ValidationError is a DecodeError, too
        raise ConfigError(f"{source}: {error}") from None


class KeyUsage(msgspec.Struct, frozen=True):
    """The use of one key's limits by the requests of one router.

    ``requests``, ``tokens``: what they have taken since the router began. ``in_flight``: requests that have not ended.
    ``requests_left``, ``tokens_left``: what is left there of a minute's amounts after the requests of all routers, a debt
    if it is below 0; None without such a limit.
    """

    requests: int = 0
    tokens: int = 0
    in_flight: int = 0
    requests_left: float | None = None
    tokens_left: float | None = None


class _Bucket:
    """A minute's amount of something, which refills steadily. ``level`` below 0 is a debt."""

    __slots__ = ("_per_second", "_refilled_at", "capacity", "level")

    def __init__(self, per_minute: int, now: float) -> None:
        self.capacity = self.level = float(per_minute)
        self._per_second = per_minute / _MINUTE
        self._refilled_at = now

    def resize(self, per_minute: int, now: float) -> None:
        """Change the amount a minute; the level, a debt included, stays."""
        self.refill(now)
        self.capacity = float(per_minute)
        self._per_second = per_minute / _MINUTE
        self.level = min(self.level, self.capacity)

    def refill(self, now: float) -> None:
        """Add what has accrued."""
        self.level = min(self.capacity, self.level + (now - self._refilled_at) * self._per_second)
        self._refilled_at = now

    def wait_seconds(self, now: float) -> float:
        """Return the time until one unit is there, 0 if it is."""
        self.refill(now)
        return max(0.0, (1.0 - self.level) / self._per_second)

    def take(self, amount: float) -> None:
        """Take an amount, also beyond what is there; a negative one is given back."""
        self.level = min(self.capacity, self.level - amount)


class _KeyState:
    """The use of one name's limits.

    ``in_flight``: requests of this router that have not ended. ``taken_requests``, ``taken_tokens``: what its requests have
    taken. ``version``: the limiter's at the last change of these. ``peers``: the same of other routers. The buckets are
    for the requests of all.
    """

    __slots__ = (
        "in_flight",
        "limits",
        "peers",
        "requests",
        "taken_requests",
        "taken_tokens",
        "tokens",
        "version",
    )

    def __init__(self) -> None:
        self.in_flight = self.taken_requests = self.taken_tokens = self.version = 0
        self.limits = KeyLimits()
        self.peers: dict[str, KeyUsage] = {}
        self.requests: _Bucket | None = None
        self.tokens: _Bucket | None = None

    @property
    def in_flight_anywhere(self) -> int:
        """The requests of all routers that have not ended."""
        if not self.peers:
            return self.in_flight
        return self.in_flight + sum(each.in_flight for each in self.peers.values())

    def read(self, now: float) -> KeyUsage:
        """Return the use by this router's requests."""
        for bucket in (self.requests, self.tokens):
            if bucket is not None:
                bucket.refill(now)
        return KeyUsage(
            requests=self.taken_requests,
            tokens=self.taken_tokens,
            in_flight=self.in_flight,
            requests_left=None if self.requests is None else self.requests.level,
            tokens_left=None if self.tokens is None else self.tokens.level,
        )

    def adopt_levels(self, usage: KeyUsage, now: float) -> None:
        """Lower the buckets to what is left at a router that was not known before."""
        for bucket, left in ((self.requests, usage.requests_left), (self.tokens, usage.tokens_left)):
            if bucket is not None and left is not None:
                bucket.refill(now)
                bucket.level = min(bucket.level, left)

    def charge_peer(self, requests: int, tokens: int, now: float) -> None:
        """Take what another router's requests have taken since its last report."""
        for bucket, amount in ((self.requests, requests), (self.tokens, tokens)):
            if bucket is not None and amount:
                bucket.refill(now)
                bucket.take(amount)

    def set_limits(self, limits: KeyLimits, now: float) -> None:
        self.limits = limits
        self.requests = _resized(self.requests, limits.requests_per_minute, now)
        self.tokens = _resized(self.tokens, limits.tokens_per_minute, now)


def _resized(bucket: _Bucket | None, per_minute: _Field, now: float) -> _Bucket | None:
    if not isinstance(per_minute, int):
        return None
    if bucket is None:
        return _Bucket(per_minute, now)
    bucket.resize(per_minute, now)
    return bucket


class Admission:
    """One admitted request. It holds its place in the concurrency until ``end``, which every request reaches once."""

    __slots__ = ("_is_over", "_limiter", "_state", "_taken")

    def __init__(self, limiter: "RateLimiter", state: _KeyState, taken: int) -> None:
        """``taken``: tokens that were taken in advance."""
        self._limiter = limiter
        self._state = state
        self._is_over = False
        self._taken = taken

    def end(self, tokens: int) -> None:
        """End the request, which used ``tokens``. A second call has no effect."""
        if self._is_over:
            return
        self._is_over = True
        self._limiter.settle(self._state, tokens - self._taken)


class RateLimiter:
    """Admits requests by the name of their key, or refuses them."""

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._states: dict[str, _KeyState] = {}
        self.version = 0
        """It grows with each change that ``read_usage`` reports."""

    def replace(self, limits: Limits) -> None:
        """Apply other limits from now on. What each key has used stays counted."""
        self._limits = limits
        now = self._clock()
        for name, state in self._states.items():
            state.set_limits(limits.for_key(name), now)

    def set_names(self, names: Collection[str]) -> None:
        """Begin with the names of all keys, and forget those that have none any more and no request in flight."""
        now = self._clock()
        for name in sorted(names):
            self._find(name, now)
        for name in [name for name in self._states if name not in names]:
            if not self._states[name].in_flight:
                del self._states[name]

    def in_flight(self) -> dict[str, int]:
        """Return this router's requests in flight by the name of their key."""
        return {name: self._states[name].in_flight for name in sorted(self._states)}

    def admit(self, name: str, estimated_tokens: int) -> Admission:
        """Admit a request of the key called ``name``; ``estimated_tokens`` are taken until its tokens are known.

        Raises:
            RateLimited: A limit of the key is used up. Its ``retry_after_seconds`` are those until the limit allows a request.
        """
        now = self._clock()
        state = self._find(name, now)
        self._check(name, state, now)
        if state.requests is not None:
            state.requests.take(1)
        if state.tokens is not None:
            state.tokens.take(estimated_tokens)
        state.taken_requests += 1
        state.taken_tokens += estimated_tokens
        state.in_flight += 1
        self.version = state.version = self.version + 1
        return Admission(self, state, estimated_tokens)

    def settle(self, state: _KeyState, tokens: int) -> None:
        """Take what an ended request used beyond what was taken for it in advance, and free its place."""
        if state.tokens is not None:
            state.tokens.refill(self._clock())
            state.tokens.take(tokens)
        state.taken_tokens += tokens
        state.in_flight -= 1
        self.version = state.version = self.version + 1

    def read_usage(self, since: int) -> dict[str, KeyUsage]:
        """Return the use by this router's requests, of the names for which it has changed after the version ``since``."""
        now = self._clock()
        return {name: state.read(now) for name, state in self._states.items() if state.version > since}

    def record_peer(self, peer: str, usage: Mapping[str, KeyUsage]) -> None:
        """Count the use by the requests of another router, of the names in ``usage``. ``peer``: that router's id."""
        now = self._clock()
        for name, used in usage.items():
            state = self._find(name, now)
            before = state.peers.get(peer)
            # Lower totals are those of a peer that forgot the key meanwhile, and counts from 0 again.
            if before is None or used.requests < before.requests:
                state.adopt_levels(used, now)
            else:
                state.charge_peer(used.requests - before.requests, used.tokens - before.tokens, now)
            state.peers[peer] = used

    def end_peer_requests(self, peer: str) -> None:
        """Treat all requests of another router as ended, because it does not answer. What they took stays counted."""
        for state in self._states.values():
            if peer in state.peers:
                state.peers[peer] = msgspec.structs.replace(state.peers[peer], in_flight=0)

    def forget_peer(self, peer: str) -> None:
        """Forget another router, which has ended. What its requests took stays counted."""
        for state in self._states.values():
            state.peers.pop(peer, None)

    def _find(self, name: str, now: float) -> _KeyState:
        """Return the state of a name. A new one is reported, so that peers know its totals before they grow."""
        state = self._states.get(name)
        if state is None:
            state = self._states[name] = _KeyState()
            state.set_limits(self._limits.for_key(name), now)
            self.version = state.version = self.version + 1
        return state

    def _check(self, name: str, state: _KeyState, now: float) -> None:
        limits = state.limits
        if (
            isinstance(limits.concurrency, int)
            and (in_flight := state.in_flight_anywhere) >= limits.concurrency
        ):
            raise RateLimited(
                "concurrency",
                f"the API key {name!r} has {in_flight} requests in progress, which is its limit; "
                "retry when one has ended",
                retry_after_seconds=BUSY_RETRY_SECONDS,
            )
        for bucket, limit, unit in (
            (state.requests, "requestsPerMinute", "requests"),
            (state.tokens, "tokensPerMinute", "tokens"),
        ):
            wait = bucket.wait_seconds(now) if bucket is not None else 0.0
            if bucket is not None and wait > 0:
                seconds = math.ceil(wait)
                raise RateLimited(
                    limit,
                    f"the API key {name!r} has used its {bucket.capacity:.0f} {unit} a minute; retry in {seconds} s",
                    retry_after_seconds=seconds,
                )
