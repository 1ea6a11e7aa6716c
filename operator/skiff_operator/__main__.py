"""The command `skiff-operator`: settings, then the Lease, then kopf."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final

import uvloop

from skiff_operator import handlers, log, metrics
from skiff_operator.apply import Applier
from skiff_operator.autoscaler import Autoscaler
from skiff_operator.cache import Cache
from skiff_operator.client import Client, configure
from skiff_operator.controller import Controller
from skiff_operator.endpoints import serving
from skiff_operator.errors import ApiNotFound, OperatorError, Retryable, SettingsError
from skiff_operator.kinds import ADDONS, Kind
from skiff_operator.leader import Leadership
from skiff_operator.lora.controller import LoRAController
from skiff_operator.lora.index import Index as AdapterIndex
from skiff_operator.model_caches.controller import ModelCacheController
from skiff_operator.model_caches.index import Index
from skiff_operator.nodes import Nodes
from skiff_operator.observe import Observer
from skiff_operator.pod_events import PodEvents
from skiff_operator.reconcile import Reconciler
from skiff_operator.rollout_analyzer import RolloutAnalyzer
from skiff_operator.room import RoomFinder
from skiff_operator.scale_in import ScaleIn
from skiff_operator.settings import Settings, from_arguments
from skiff_operator.strategy_chooser import StrategyChooser
from skiff_operator.watch_streams import WatchStreams

_STOP_SECONDS: Final = 5.0


def main() -> int:
    """Run until SIGTERM. Exit codes: 0 stopped, 1 failed or lost the Lease, 2 invalid settings."""
    try:
        settings = from_arguments(sys.argv[1:], os.environ)
    except SettingsError as error:
        print(f"skiff-operator: {error}", file=sys.stderr)
        return 2
    log.configure(settings.log_level)
    try:
        uvloop.run(serve(settings))
    except OperatorError as error:
        log.logger.error("the operator ends", extra={"error": str(error)})
        return 1
    return 0


async def serve(settings: Settings) -> None:
    """Run the operator with these settings until the process ends.

    Raises:
        OperatorError: the process cannot go on.
    """
    configuration = await configure()
    client = Client(configuration, connections=settings.workers + 4)
    # Renewals of the Lease must not wait behind other requests that hang.
    lease_client = Client(configuration, connections=1)
    cache = Cache()
    streams = WatchStreams(settings)
    observer = Observer(cache, settings)
    applier = Applier(client, observer, reporter=settings.identity)
    nodes, pod_events = Nodes(client, settings), PodEvents(client, settings)
    chooser = StrategyChooser(RoomFinder(client, settings), pod_events)
    analyzer = RolloutAnalyzer(settings)
    index = Index(settings) if settings.model_caches else None
    reconciler = Reconciler(
        observer,
        applier,
        nodes,
        pod_events,
        chooser,
        ScaleIn(client),
        analyzer,
        settings,
        model_caches=index,
        is_complete=streams.is_complete,
    )
    adapters = AdapterIndex()
    controller = Controller(observer, reconciler, streams, settings, adapters)
    lora = LoRAController(
        cache, adapters, client, controller.enqueue, settings, synced=controller.streams.synced
    )
    controller.wake_adapters = lora.wake
    metrics.registry.register(metrics.ObjectsCollector(cache))
    metrics.registry.register(metrics.StreamsCollector(streams))
    autoscaler = Autoscaler(cache, client, applier, controller.enqueue, settings)
    extra: list[Callable[[], Coroutine[Any, Any, None]]] = [autoscaler.run, lora.run]
    if index is not None:
        caches = ModelCacheController(client, index, cache, settings, synced=lambda: not streams.unsynced())
        extra.append(caches.run)
    work = partial(_work, controller, client, settings, extra)
    try:
        async with serving(settings, unhealthy=controller.unhealthy, unready=streams.unsynced):
            lead = _lead(work, Leadership(lease_client, settings)) if settings.leader_elect else work()
            await _until_first(lead, _signalled())
    finally:
        await controller.startups.close()
        await analyzer.close()
        await autoscaler.close()
        await lora.close()
        await lease_client.close()
        await client.close()


async def _signalled() -> None:
    """Wait for SIGTERM or SIGINT; once kopf runs, it handles both and ends by itself."""
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    await stopped.wait()


async def _lead(work: Callable[[], Coroutine[Any, Any, None]], leadership: Leadership) -> None:
    """Wait for the Lease and work while it is ours; its loss ends the process at once.

    There is no clean-up then: work in flight must not complete while another process leads.
    """
    await leadership.acquire()
    try:
        await _until_first(work(), leadership.hold(on_loss=_end_process))
    finally:
        await leadership.release()


def _end_process(reason: str) -> None:
    log.logger.error("the operator ends", extra={"error": reason})
    os._exit(1)


async def _served_kinds(client: Client, streams: WatchStreams) -> tuple[Kind, ...]:
    """Return the kinds to watch that the API server serves: those of addons come and go with them."""
    return tuple([kind for kind in streams.kinds if await _is_served(client, kind)])


async def _is_served(client: Client, kind: Kind) -> bool:
    """Return whether the API server serves a kind that an addon defines; True for all others."""
    if kind not in ADDONS:
        return True
    path = f"/apis/{kind.api_version}"
    while True:
        try:
            await client.request("GET", path)
        except ApiNotFound:
            text = f"{ADDONS[kind].name} is not installed; no {kind.name} is watched"
            log.logger.warning(text, extra={"path": path})
            return False
        except Retryable:
            await asyncio.sleep(_STOP_SECONDS)  # an API server may start late
        else:
            return True


async def _work(
    controller: Controller,
    client: Client,
    settings: Settings,
    extra: list[Callable[[], Coroutine[Any, Any, None]]],
) -> None:
    """Watch and reconcile until a signal stops kopf, with `extra` loops beside."""
    controller.streams.begin(await _served_kinds(client, controller.streams))
    workers = [controller.work() for _ in range(settings.workers)]
    await _until_first(
        handlers.run(controller, settings), controller.resync(), *workers, *(loop() for loop in extra)
    )


async def _until_first(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run all tasks; when one ends, cancel the others and raise its exception, if any."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=_STOP_SECONDS)
    for task in done:
        task.result()


if __name__ == "__main__":
    sys.exit(main())
