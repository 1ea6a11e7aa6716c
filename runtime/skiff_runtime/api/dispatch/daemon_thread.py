"""Blocking calls that may take minutes, each on a daemon thread of its own.

The threads of ``asyncio.to_thread`` do not suit them: they are few and shared, so long calls delay all others, and the end of
the event loop waits for each of them.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


async def run_on_daemon_thread(function: Callable[[], T], *, name: str) -> T:
    """Return the result of ``function``, or raise its error. Once the caller is cancelled, nothing waits for the thread."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # so that the thread may set a result after its caller was cancelled

    def work() -> None:
        try:
            result = function()
        except BaseException as error:  # noqa: BLE001 (raised again by the caller)
            future.set_exception(error)
        else:
            future.set_result(result)

    Thread(target=work, name=name, daemon=True).start()
    return await asyncio.wrap_future(future)
