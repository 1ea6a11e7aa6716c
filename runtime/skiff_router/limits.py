"""Limits for each API key on requests and tokens a minute, and on concurrency.

Keys of one name share its limits, so that a key may be rotated. A minute's amount refills steadily, so a key that was idle may
use up to one minute's amount at once. The tokens of a request are known at its end: at its start its prompt is estimated from
the size of its body, and the difference is settled then. What a request takes beyond the amount is a debt that delays later
ones, so in the long run the limit holds exactly, and no request is too large to be served at all.

The counts are those of one router.
"""

import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final, TypeVar

import msgspec

from skiff_runtime.config.api_keys import MAX_API_KEYS
from skiff_runtime.errors import ConfigError, RequestError

MAX_FILE_BYTES: Final = 1 << 20
BYTES_PER_TOKEN: Final = 4
"""For the estimate of a prompt before its tokens are known; English text has about this many."""
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
    """The limits of one key as the file has them: a field that is left out is that of the default, null is no limit."""

    requests_per_minute: _Field = msgspec.UNSET
    tokens_per_minute: _Field = msgspec.UNSET
    concurrency: _Field = msgspec.UNSET

    def over(self, default: "KeyLimits") -> "KeyLimits":
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

    def of(self, name: str) -> KeyLimits:
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
        name: _decode(raw, KeyLimits, f"{source}: 'keys.{name}'").over(default)
        for name, raw in parsed.keys.items()
    }
    return Limits(default, keys)


def _decode(data: bytes | msgspec.Raw, kind: type[StructT], source: str) -> StructT:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:  # ValidationError is a DecodeError, too
        raise ConfigError(f"{source}: {error}") from None


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
    """The use of one name's limits. ``in_flight``: its requests that have not ended."""

    __slots__ = ("in_flight", "limits", "requests", "tokens")

    def __init__(self) -> None:
        self.in_flight = 0
        self.limits = KeyLimits()
        self.requests: _Bucket | None = None
        self.tokens: _Bucket | None = None

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

    __slots__ = ("_clock", "_is_over", "_state", "_taken")

    def __init__(self, state: _KeyState, taken: int, clock: Callable[[], float]) -> None:
        """``taken``: tokens that were taken in advance."""
        self._clock = clock
        self._state = state
        self._is_over = False
        self._taken = taken

    def end(self, tokens: int) -> None:
        """End the request, which used ``tokens``. A second call has no effect."""
        if self._is_over:
            return
        self._is_over = True
        self._state.in_flight -= 1
        if self._state.tokens is not None:
            self._state.tokens.refill(self._clock())
            self._state.tokens.take(tokens - self._taken)


class RateLimiter:
    """Admits requests by the name of their key, or refuses them."""

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._states: dict[str, _KeyState] = {}

    def replace(self, limits: Limits) -> None:
        """Apply other limits from now on. What each key has used stays counted."""
        self._limits = limits
        now = self._clock()
        for name, state in self._states.items():
            state.set_limits(limits.of(name), now)

    def keep_only(self, names: Collection[str]) -> None:
        """Forget the names that have no key any more and no request in flight."""
        for name in [name for name in self._states if name not in names]:
            if not self._states[name].in_flight:
                del self._states[name]

    def in_flight(self) -> dict[str, int]:
        """Return the requests in flight by the name of their key."""
        return {name: self._states[name].in_flight for name in sorted(self._states)}

    def admit(self, name: str, estimated_tokens: int) -> Admission:
        """Admit a request of the key called ``name``; ``estimated_tokens`` are taken until its tokens are known.

        Raises:
            RateLimited: A limit of the key is used up. Its ``retry_after_seconds`` are those until the limit allows a request.
        """
        now = self._clock()
        state = self._states.get(name)
        if state is None:
            state = self._states[name] = _KeyState()
            state.set_limits(self._limits.of(name), now)
        self._check(name, state, now)
        if state.requests is not None:
            state.requests.take(1)
        if state.tokens is not None:
            state.tokens.take(estimated_tokens)
        state.in_flight += 1
        return Admission(state, estimated_tokens, self._clock)

    def _check(self, name: str, state: _KeyState, now: float) -> None:
        limits = state.limits
        if isinstance(limits.concurrency, int) and state.in_flight >= limits.concurrency:
            raise RateLimited(
                "concurrency",
                f"the API key {name!r} has {state.in_flight} requests in progress, as many as it may have; "
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
