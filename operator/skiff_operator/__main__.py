"""The command `skiff-operator`: settings, then the Lease, then kopf."""

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine
from typing import Any, Final

import uvloop

from skiff_operator import handlers, log, metrics
from skiff_operator.apply import Applier
from skiff_operator.cache import Cache
from skiff_operator.client import Client, configure
from skiff_operator.controller import Controller
from skiff_operator.endpoints import serving
from skiff_operator.errors import OperatorError, SettingsError
from skiff_operator.leader import Leadership
from skiff_operator.observe import Observer
from skiff_operator.reconcile import Reconciler
from skiff_operator.settings import Settings, from_arguments

_STOP_SECONDS: Final = 5.0


def main() -> int:
    """Run until told to stop. Exit codes: 0 stopped, 1 failed or lost the Lease, 2 bad settings."""
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
    """Everything between reading the settings and the end of the process.

    Raises:
        OperatorError: the process cannot go on.
    """
    client = Client(await configure(), connections=settings.workers + 4)
    cache = Cache()
    observer = Observer(cache, settings)
    applier = Applier(client, observer, reporter=settings.identity)
    controller = Controller(observer, Reconciler(observer, applier, settings), settings)
    metrics.registry.register(metrics.ObjectsCollector(cache))
    try:
        async with serving(settings, controller.unhealthy):
            leadership = Leadership(client, settings) if settings.leader_elect else None
            if leadership is None or await _led(leadership):
                await _operate(client, observer, controller, leadership, settings)
    finally:
        await client.close()


async def _led(leadership: Leadership) -> bool:
    """Wait for the Lease; False when a signal came first."""
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    tasks = [asyncio.create_task(leadership.acquire()), asyncio.create_task(stopped.wait())]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.remove_signal_handler(number)
    if tasks[0] in done:
        tasks[0].result()
    return tasks[0] in done


async def _operate(
    client: Client,
    observer: Observer,
    controller: Controller,
    leadership: Leadership | None,
    settings: Settings,
) -> None:
    """List everything, then watch and work until kopf is told to stop or the Lease is lost."""
    try:
        await observer.prime(client)
        controller.start()
        endless = [controller.work() for _ in range(settings.workers)] + [controller.resync()]
        if leadership is not None:
            endless.append(leadership.hold())
        await _until_first(handlers.run(controller, settings), endless)
    finally:
        if leadership is not None:
            await leadership.release()


async def _until_first(watching: Coroutine[Any, Any, None], endless: list[Coroutine[Any, Any, None]]) -> None:
    """Run all; when the watches end or anything fails, stop the rest and raise the failure."""
    tasks = [asyncio.create_task(coroutine) for coroutine in (*endless, watching)]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await asyncio.wait(tasks, timeout=_STOP_SECONDS)
    for task in done:
        task.result()


if __name__ == "__main__":
    sys.exit(main())
