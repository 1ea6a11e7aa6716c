"""The startup of a pod: its steps by the times of its status and by the server's report, observed once."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from aiohttp import web

from skiff_operator import metrics, startup
from skiff_operator.cache import Cache
from skiff_operator.controller import Controller
from skiff_operator.kinds import POD
from skiff_operator.lora.index import Index
from skiff_operator.observe import Observer, ReconcileRequest
from skiff_operator.settings import Settings
from skiff_operator.startup import PodStartup
from skiff_operator.startup_reader import StartupReader
from skiff_operator.watch_streams import WatchStreams

KEY = ("default", "llama")
REPORT = {
    "status": "ready",
    "elapsed_seconds": 9.5,
    "processes": {
        "api": {"phase": "ready", "progress": 1.0, "seconds": {"spawn": 0.454}},
        "rank0": {
            "phase": "ready",
            "progress": 1.0,
            "seconds": {"spawn": 1.5, "config": 0.5, "weights": 4.0, "kv_cache": 2.0, "warmup": 1.0},
        },
        "rank1": {
            "phase": "ready",
            "progress": 1.0,
            "seconds": {"spawn": 1.0, "weights": 5.0, "warmup": 1.25},
        },
    },
}
FULL = PodStartup(
    pod="llama-1",
    revision="r1",
    at="2026-01-01T00:01:40Z",
    scheduled_seconds=2.0,
    pulled_seconds=9.0,
    fetched_seconds=58.0,
    loaded_seconds=7.0,
    profiled_seconds=2.0,
    captured_seconds=1.25,
    ready_seconds=100.0,
)


def at(second: int) -> str:
    """A time, in seconds since the pod's creation."""
    return f"2026-01-01T00:{second // 60:02d}:{second % 60:02d}Z"


def pod(
    *,
    ready: bool = True,
    restarts: int = 0,
    version: int = 1,
    download: bool = True,
    started: bool | None = None,
    **status: Any,
) -> dict[str, Any]:
    """A pod that waited 2 s for a node, 8 for its image, 58 for its weights, 1 for the server, and started in 31."""
    fetch = {"terminated": {"exitCode": 0, "startedAt": at(10), "finishedAt": at(68)}}
    changed = {"PodScheduled": 2, "Initialized": 68, "ContainersReady": 100, "Ready": 100}
    conditions = [
        {
            "type": kind,
            "status": str(ready or kind in ("PodScheduled", "Initialized")),
            "lastTransitionTime": at(second),
        }
        for kind, second in changed.items()
    ]
    image = {"image": "img:1", "restartCount": 0}
    inits = [{"name": "fetch", "state": fetch, **image}] if download else []
    main = {"name": "runtime", "state": {"running": {"startedAt": at(69)}}, "restartCount": restarts}
    main["started"] = ready if started is None else started
    return {
        "metadata": {
            "name": "llama-1",
            "namespace": "default",
            "uid": "u1",
            "resourceVersion": str(version),
            "creationTimestamp": at(0),
            "labels": {
                "serving.skiff.dev/inferenceservice": "llama",
                "serving.skiff.dev/revision": "r1",
                "pod-template-hash": "h",
            },
            "ownerReferences": [{"kind": "ReplicaSet", "name": "llama-h", "controller": True}],
        },
        "spec": {},
        "status": {
            "podIP": "127.0.0.1",
            "conditions": conditions,
            "initContainerStatuses": inits,
            "containerStatuses": [{**image, **main}],
            **status,
        },
    }


def test_the_steps_of_a_start() -> None:
    found = startup.read(pod())
    assert found is not None
    assert startup.with_server_steps(found, msgspec.json.encode(REPORT)) == FULL
    assert FULL.seconds() == dict(zip(startup.STEPS, (2, 9, 58, 7, 2, 1.25, 100), strict=True))


def test_without_a_download_all_until_the_server_is_pulling() -> None:
    found = startup.read(pod(download=False))
    assert found is not None
    assert found.seconds() == {"scheduled": 2, "pulled": 67, "ready": 100}


def test_a_restarted_container_and_missing_times_are_no_start() -> None:
    assert startup.read(pod(restarts=1)) is None
    assert startup.read(pod(conditions=[])) is None
    early = [{"type": "Ready", "status": "True", "lastTransitionTime": "2025-01-01T00:00:00Z"}]
    assert startup.read(pod(conditions=early)) is None, "a clock is wrong"


def observer() -> Observer:
    """An observer that knows nothing."""
    return Observer(Cache(), Settings())


def test_a_start_is_reported_once_and_only_when_it_was_seen() -> None:
    seen = observer()
    assert seen.observe(POD, pod(ready=False), "ADDED") is not None
    request = seen.observe(POD, pod(version=2), "MODIFIED")
    assert request is not None and request.started is not None and request.started.ip == "127.0.0.1"
    begun = request.started.startup
    completed = startup.with_server_steps(begun, msgspec.json.encode(REPORT))
    assert seen.observe_startup(KEY, "another", completed) is None
    assert seen.observe_startup(KEY, "u1", completed) is not None
    for version, ready in ((3, False), (4, True)):
        request = seen.observe(POD, pod(ready=ready, version=version), "MODIFIED")
        assert request is not None and request.started is None, "a probe that failed for a while is no start"
    entry = seen.cache.get(KEY)
    assert entry is not None and entry.pods["llama-1"].startup == FULL


def test_a_pod_that_may_have_been_ready_before_is_not_recorded() -> None:
    """Its readiness may have come and gone before this operator started."""
    for first, second in ((True, True), (False, True)):
        late = observer()
        for version, ready, event in ((1, first, "LISTED"), (2, False, "MODIFIED"), (3, second, "MODIFIED")):
            request = late.observe(POD, pod(ready=ready, version=version, started=True), event)  # type: ignore[arg-type]
            assert request is None or request.started is None


@asynccontextmanager
async def serving(body: bytes, *, status: int = 200) -> AsyncIterator[int]:
    """A server with this body at /startupz; yields its port."""

    async def startupz(_: web.Request) -> web.Response:
        return web.Response(body=body, status=status)

    app = web.Application()
    app.add_routes([web.get("/startupz", startupz)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def observed(step: str) -> float:
    """The number of observations of a step in the histogram."""
    return metrics.registry.get_sample_value("skiff_operator_pod_startup_seconds_count", {"phase": step}) or 0


async def read(body: bytes, *, status: int = 200) -> PodStartup | None:
    """The startup in the cache after a pod became ready whose server answers so."""
    seen, done = observer(), asyncio.Event()

    def enqueue(_: ReconcileRequest) -> None:
        done.set()

    async with serving(body, status=status) as port:
        reader = StartupReader(seen, enqueue, port=port)
        seen.observe(POD, pod(ready=False), "ADDED")
        request = seen.observe(POD, pod(version=2), "MODIFIED")
        assert request is not None and request.started is not None
        reader.begin(KEY, request.started)
        await reader.wait()
    entry = seen.cache.get(KEY)
    assert entry is not None and done.is_set() == (entry.pods["llama-1"].startup == FULL)
    return entry.pods["llama-1"].startup


def test_the_servers_report_completes_it() -> None:
    before = {step: observed(step) for step in startup.STEPS}
    assert asyncio.run(read(msgspec.json.encode(REPORT))) == FULL
    assert {step: observed(step) - before[step] for step in startup.STEPS} == dict.fromkeys(startup.STEPS, 1)


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"{", 200), (b'{"processes": 5}', 200), (b"{}", 503), (b" " * (300 << 10), 200), (b"", 302)],
)
def test_a_server_without_a_report_leaves_what_the_pod_shows(body: bytes, status: int) -> None:
    before = observed("loaded"), observed("ready")
    assert asyncio.run(read(body, status=status)) == startup.read(pod())
    assert (observed("loaded"), observed("ready")) == (before[0], before[1] + 1)


def test_the_controller_reads_it_from_the_event() -> None:
    """Only IP addresses are contacted."""

    async def events() -> None:
        settings = Settings()
        control = Controller(observer(), None, WatchStreams(settings), settings, Index())  # type: ignore[arg-type]
        control.on_event(POD, "ADDED", pod(ready=False))
        control.on_event(POD, "MODIFIED", pod(version=2, podIP="not an address/"))
        await control.startups.close()

    before = observed("ready")
    asyncio.run(events())
    assert observed("ready") == before + 1
