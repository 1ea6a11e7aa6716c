"""The meter of each request: admitted within the limits of its API key, and counted by key and model when it ends."""

import time
from dataclasses import dataclass
from typing import Final

from skiff_router.limits import Admission, RateLimited, RateLimiter, estimate_prompt
from skiff_router.metrics import RouterMetrics
from skiff_router.token_usage import TokenUsage
from skiff_router.usage_log import UsageLine, UsageLog
from skiff_runtime import log
from skiff_runtime.api.http.asgi import Scope
from skiff_runtime.api.http.auth import get_principal
from skiff_runtime.api.http.key_file import KeyFile
from skiff_runtime.api.http.responses import get_request_id

UNNAMED: Final = "unnamed"
"""The name of all keys that have none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metering:
    """The parts that all requests share. ``keys`` is None without keys: then requests have no limits, and no key's name."""

    limiter: RateLimiter
    metrics: RouterMetrics
    keys: KeyFile | None
    log: UsageLog | None

    def names(self) -> frozenset[str]:
        """Return the names of all keys."""
        return frozenset() if self.keys is None else frozenset(name or UNNAMED for name in self.keys.names)

    def begin(self, scope: Scope, body_bytes: int) -> "Meter":
        """Admit a request with a body of ``body_bytes``.

        Raises:
            RateLimited: A limit of its key is used up. The refusal is counted already.
        """
        name = "" if self.keys is None else self.keys.find_name(get_principal(scope).key) or UNNAMED
        estimate = estimate_prompt(body_bytes)
        try:
            admission = self.limiter.admit(name, estimate) if name else None
        except RateLimited as error:
            self.metrics.record_limited(name, error.limit)
            Meter(self, scope, name, None, estimate).end(error.status)
            raise
        return Meter(self, scope, name, admission, estimate)


class Meter:
    """One request. ``end`` counts it; ``close``, which every request reaches, frees its place in the concurrency."""

    def __init__(
        self,
        metering: Metering,
        scope: Scope,
        name: str,
        admission: Admission | None,
        estimated_prompt: int,
    ) -> None:
        """``name``: of the key, "" without keys."""
        self.estimated_prompt = estimated_prompt
        self._metering = metering
        self._scope = scope
        self._name = name
        self._admission = admission
        self._began = time.monotonic()
        self._is_over = False

    def end(
        self, status: int, usage: TokenUsage | None = None, *, model: str = "", service: str = ""
    ) -> None:
        """Count the request. ``usage`` is None if no pod computed anything; ``model`` is "" if it was not found."""
        if self._is_over:
            return
        self._is_over = True
        used = usage or TokenUsage()
        if self._admission is not None:
            self._admission.end(used.total)
        if usage is not None:
            self._metering.metrics.record_usage(self._name, model, usage)
        if self._metering.log is not None:
            self._metering.log.write(
                UsageLine(
                    time=log.format_time(time.time()),
                    id=get_request_id(self._scope),
                    key=self._name or None,
                    model=model or None,
                    service=service or None,
                    endpoint=self._scope["path"],
                    status=status,
                    seconds=round(time.monotonic() - self._began, 6),
                    prompt_tokens=used.prompt,
                    cached_tokens=used.cached,
                    completion_tokens=used.completion,
                    estimated=used.estimated,
                )
            )

    def close(self) -> None:
        """Free the request's place, however it ended."""
        if self._admission is not None:
            self._admission.end(0)
