"""Probes that time out: a pod that hangs is ejected, but not where the router itself stood still."""

import asyncio
import time
from typing import Any, cast

import pytest

from skiff_router import prober
from skiff_router.endpoints import Endpoint, Registry
from skiff_router.prober import Prober
from skiff_router.proxy import Exchanges
from skiff_router.upstream import Address


@pytest.mark.parametrize("stalls", [False, True])
def test_pod_is_ejected_unless_this_process_stood_still(
    monkeypatch: pytest.MonkeyPatch, stalls: bool
) -> None:
    monkeypatch.setattr(prober, "PROBE_TIMEOUT_SECONDS", 0.1)
    monkeypatch.setattr(prober, "STALL_SECONDS", 5.0)

    async def never(*_: object, seconds: float, limit: int) -> Any:
        if stalls:
            asyncio.get_running_loop().call_soon(time.sleep, 5.2)
        async with asyncio.timeout(seconds):
            await asyncio.Event().wait()

    monkeypatch.setattr(prober, "fetch", never)

    async def test() -> Endpoint:
        endpoint = Endpoint("pod", Address("127.0.0.1", 1))
        await Prober(cast(Registry, None), Exchanges())._probe(endpoint)
        return endpoint

    assert asyncio.run(test()).ejected is not stalls


def test_exchanges_fail_only_when_probes_have_timed_out_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prober, "PROBE_TIMEOUT_SECONDS", 0.01)
    monkeypatch.setattr(prober, "STALL_SECONDS", 60.0)
    outcomes = iter(["timeout", "ready", "timeout", "timeout"])

    async def answer(*_: object, seconds: float, limit: int) -> tuple[int, bytes]:
        if next(outcomes) == "timeout":
            raise TimeoutError
        return 200, b""

    monkeypatch.setattr(prober, "fetch", answer)
    failed: list[str] = []

    class Recorder:
        def fail(self, _endpoint: Endpoint, reason: str) -> None:
            failed.append(reason)

    async def test() -> None:
        endpoint = Endpoint("pod", Address("127.0.0.1", 1))
        of = Prober(cast(Registry, None), cast(Exchanges, Recorder()))
        for ejected, failures in ((True, 0), (False, 0), (True, 0), (True, 1)):
            await of._probe(endpoint)
            assert endpoint.ejected is ejected and len(failed) == failures

    asyncio.run(test())
    assert failed == ["the pod hangs: no answer to 2 probes in a row"]
