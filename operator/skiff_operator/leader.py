"""Leader election by a Lease: one replica works, the others wait; a leader that cannot renew in time exits."""

import asyncio
import datetime
import random
import time
from collections.abc import Callable
from typing import Any, Final

from skiff_operator import metrics
from skiff_operator.client import Client
from skiff_operator.errors import ApiAlreadyExists, ApiConflict, ApiNotFound, ApiRefused, ApiUnavailable
from skiff_operator.kinds import LEASE
from skiff_operator.log import logger
from skiff_operator.settings import Settings

_RETRY_SECONDS: Final = 2.0
_RELEASE_SECONDS: Final = 3.0


class Leadership:
    """This process's part in the election.

    Clocks of different nodes are never compared: a holder counts as gone when its record has not changed for
    the lease duration on our own clock.
    """

    def __init__(self, client: Client, settings: Settings) -> None:
        """Prepare to compete for the Lease named in `settings`."""
        self._client = client
        self._settings = settings
        self._seen = ("", "")
        self._seen_at = time.monotonic()
        self._renewed_at = 0.0
        self._mine: dict[str, Any] | None = None

    async def acquire(self) -> None:
        """Wait until this process is the leader."""
        waiting = False
        while True:
            try:
                if await self._try():
                    break
            except ApiUnavailable as error:
                logger.warning("lease not readable", extra={"error": str(error)})
            if not waiting:
                logger.info("waiting for the lease", extra={"holder": self._seen[0]})
                waiting = True
            await asyncio.sleep(_RETRY_SECONDS * random.uniform(0.8, 1.2))
        metrics.leader.set(1)
        logger.info("leading", extra={"identity": self._settings.identity})

    async def hold(self, on_loss: Callable[[str], None]) -> None:
        """Renew for ever; call `on_loss` with the reason when another process leads, or may lead by now."""
        period = self._settings.lease_renew_seconds
        deadline = self._settings.lease_duration_seconds - period
        while True:
            await asyncio.sleep(period if time.monotonic() - self._renewed_at < period else _RETRY_SECONDS)
            try:
                async with asyncio.timeout(max(_RETRY_SECONDS, period / 2)):
                    held = await self._try()
            except (ApiUnavailable, ApiRefused, TimeoutError) as error:
                # An API server that has just started refuses everything until it has read the roles.
                logger.warning("lease not renewed", extra={"error": repr(error)})
                held = time.monotonic() - self._renewed_at < deadline
            if not held:
                metrics.leader.set(0)
                on_loss(
                    f"another process holds the Lease, or may by now (last seen holder: {self._seen[0] or 'none'})"
                )

    async def release(self) -> None:
        """Release the Lease if it is ours, so that the next leader need not wait for its expiry."""
        metrics.leader.set(0)
        if self._mine is None:
            return
        self._mine["spec"]["holderIdentity"] = ""
        try:
            async with asyncio.timeout(_RELEASE_SECONDS):
                await self._write(self._mine)
        except (ApiUnavailable, ApiConflict, ApiRefused, TimeoutError) as error:
            logger.warning("lease not released", extra={"error": repr(error)})

    async def _try(self) -> bool:
        """Acquire or renew the Lease once; False when another process holds it.

        A renewal is one write over the last written version; only a conflict causes a read.
        """
        if self._mine is not None:
            try:
                return await self._write(self._mine)
            except (ApiConflict, ApiNotFound):
                self._mine = None
        try:
            lease = await self._read()
        except ApiNotFound:
            return await self._create()
        spec = lease["spec"]
        holder = spec.get("holderIdentity") or ""
        record = (holder, spec.get("renewTime", ""))
        if record != self._seen:
            self._seen, self._seen_at = record, time.monotonic()
        if holder not in ("", self._settings.identity) and not self._expired(spec):
            return False
        if holder != self._settings.identity:
            spec["leaseTransitions"] = spec.get("leaseTransitions", 0) + 1
            spec["acquireTime"] = _micro_time()
        spec["holderIdentity"] = self._settings.identity
        spec["leaseDurationSeconds"] = self._settings.lease_duration_seconds
        try:
            return await self._write(lease)
        except ApiConflict:
            return False

    async def _create(self) -> bool:
        settings = self._settings
        body = {
            "apiVersion": LEASE.api_version,
            "kind": LEASE.name,
            "metadata": {"name": settings.lease_name, "namespace": settings.lease_namespace},
            "spec": {
                "holderIdentity": settings.identity,
                "leaseDurationSeconds": settings.lease_duration_seconds,
                "acquireTime": _micro_time(),
                "renewTime": _micro_time(),
                "leaseTransitions": 0,
            },
        }
        try:
            self._mine = await self._client.create(LEASE, settings.lease_namespace, body)
        except ApiAlreadyExists:
            return False
        self._renewed_at = time.monotonic()
        return True

    def _expired(self, spec: dict[str, Any]) -> bool:
        duration: int = spec.get("leaseDurationSeconds", self._settings.lease_duration_seconds)
        return time.monotonic() - self._seen_at > duration

    async def _read(self) -> dict[str, Any]:
        return await self._client.get(LEASE, self._settings.lease_namespace, self._settings.lease_name)

    async def _write(self, lease: dict[str, Any]) -> bool:
        asked_at = time.monotonic()
        lease["spec"]["renewTime"] = _micro_time()
        namespaced_name = self._settings.lease_namespace, self._settings.lease_name
        self._mine = await self._client.replace(LEASE, *namespaced_name, lease)
        self._renewed_at = asked_at
        return True


def _micro_time() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
