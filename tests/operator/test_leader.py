"""A leader bears with failed renewals until its Lease runs out."""

import asyncio
from typing import Any

import pytest

from skiff_operator import leader
from skiff_operator.errors import ApiRefused, ApiUnavailable, OperatorError
from skiff_operator.leader import Leadership
from skiff_operator.settings import Settings

FORBIDDEN = ApiRefused("leases is forbidden", status=403)


class Renewals:
    """The Lease of this process, whose renewals fail with `error` for a while, or always."""

    def __init__(self, error: OperatorError, failures: int) -> None:
        self._error, self._failures = error, failures
        self.tried = 0
        self.renewed = asyncio.Event()

    async def get(self, *_: object) -> dict[str, Any]:
        """Return a Lease that nobody holds."""
        return {"metadata": {"resourceVersion": "1"}, "spec": {}}

    async def replace(self, *_: Any) -> dict[str, Any]:
        """Succeed at first, so that this process leads, and once the failures are over."""
        self.tried += 1
        if 1 < self.tried <= 1 + self._failures:
            raise self._error
        if self.tried > 1:
            self.renewed.set()
        return await self.get()


@pytest.mark.parametrize("error", [FORBIDDEN, ApiUnavailable("down")], ids=["forbidden", "unavailable"])
@pytest.mark.parametrize("lasts", [False, True], ids=["for a while", "for good"])
def test_a_renewal_that_fails_costs_the_lease_only_in_the_end(
    monkeypatch: pytest.MonkeyPatch, error: OperatorError, lasts: bool
) -> None:
    """An API server that has just started refuses everybody until it has read the roles."""
    monkeypatch.setattr(leader, "_RETRY_SECONDS", 0.01)
    duration = 0.2 if lasts else 60
    settings = Settings(lease_duration_seconds=duration, lease_renew_seconds=0.001)  # type: ignore[arg-type]
    lost: list[str] = []

    async def run() -> bool:
        client: Any = Renewals(error, failures=10**6 if lasts else 3)
        leadership = Leadership(client, settings)
        await leadership.acquire()
        ended = asyncio.Event()

        def lose(reason: str) -> None:
            lost.append(reason)
            ended.set()

        holding = asyncio.create_task(leadership.hold(lose))
        waiting = asyncio.create_task((ended if lasts else client.renewed).wait())
        await asyncio.wait({holding, waiting}, timeout=60, return_when=asyncio.FIRST_COMPLETED)
        held = waiting.done() and not holding.done()
        for task in (holding, waiting):
            task.cancel()
        return held

    assert asyncio.run(run())
    assert bool(lost) == lasts
