"""Blocking calls on daemon threads, beside an event loop and beyond its end."""

import asyncio
import threading
from functools import partial

import pytest

from skiff_runtime.api.dispatch.daemon_thread import run_on_daemon_thread

TIMEOUT_SECONDS = 60


def test_result_and_error_reach_the_caller() -> None:
    async def main() -> None:
        assert await run_on_daemon_thread(lambda: 7, name="test") == 7
        with pytest.raises(ValueError, match="malformed"):
            await run_on_daemon_thread(partial(int, "malformed"), name="test")

    asyncio.run(main())


def test_end_of_the_loop_does_not_wait_for_the_thread() -> None:
    may_end, has_ended = threading.Event(), threading.Event()

    def block() -> None:
        may_end.wait(TIMEOUT_SECONDS)
        has_ended.set()

    async def main() -> None:
        task = asyncio.create_task(run_on_daemon_thread(block, name="test"))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    try:
        asyncio.run(main())
        assert not has_ended.is_set()
    finally:
        may_end.set()
    assert has_ended.wait(TIMEOUT_SECONDS)


def test_long_calls_leave_the_shared_threads_free() -> None:
    may_end = threading.Event()

    async def main() -> None:
        block = partial(may_end.wait, TIMEOUT_SECONDS)
        calls = [asyncio.create_task(run_on_daemon_thread(block, name="test")) for _ in range(40)]
        await asyncio.sleep(0)
        assert await asyncio.to_thread(lambda: 7) == 7
        may_end.set()
        assert all(await asyncio.gather(*calls))

    asyncio.run(main())
