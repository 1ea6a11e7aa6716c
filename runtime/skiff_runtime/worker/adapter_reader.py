"""The reader of a rank's LoRA adapters: reads files into host memory on a thread, while steps run.

All ranks begin a read in the same turn. Rank 0 reports its end to every scheduler; the other ranks then wait for their own
read, so each of them has the adapter before a step needs it.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import takewhile
from typing import Final, Protocol

from skiff_runtime import log
from skiff_runtime.errors import SkiffError
from skiff_runtime.messages import AdapterRead
from skiff_runtime.processes.launch import StartAdapter
from skiff_runtime.scheduler.adapter_store import AdapterStore

WAIT_SECONDS: Final = 0.2


class AdapterRegistry(Protocol):
    """The engine's host copies of adapters."""

    def register_adapter(self, adapter_id: int, path: str) -> None:
        """Read and check the adapter in a directory. Raises ``SkiffError`` if it cannot be served. Called on any thread."""
        ...

    def unregister_adapter(self, adapter_id: int) -> None:
        """Free the adapter's memory."""
        ...


class AdapterReadFailed(SkiffError):
    """This rank could not read an adapter that rank 0 has read."""


class AdapterReader(AdapterStore):
    """Adapters of one rank in host memory and on their way there."""

    def __init__(self, registry: AdapterRegistry) -> None:
        self._registry = registry
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        self._reading: dict[int, Future[None]] = {}

    @property
    def is_reading(self) -> bool:
        """Return whether a read has begun whose end was not taken."""
        return bool(self._reading)

    def preload(self, adapters: Sequence[StartAdapter], host_limit: int) -> dict[int, str]:
        """Read and check the adapters of ``--lora``, and keep the first ``host_limit`` that can be served.

        Returns the reasons of the others by their ids; they are logged, too.
        """
        errors: dict[int, str] = {}
        kept = 0
        for each in adapters:
            try:
                self._registry.register_adapter(each.adapter_id, each.path)
            except SkiffError as error:
                log.error("adapter_left_out", adapter=each.name, uri=each.uri, reason=str(error))
                errors[each.adapter_id] = str(error)
                continue
            kept += 1
            if kept > host_limit:
                self._registry.unregister_adapter(each.adapter_id)
        return errors

    def begin_read(self, adapter_id: int, path: str) -> None:
        self._reading[adapter_id] = self._thread.submit(self._registry.register_adapter, adapter_id, path)

    def drop(self, adapter_id: int) -> None:
        self._registry.unregister_adapter(adapter_id)

    def take_finished(self) -> list[AdapterRead]:
        """Return the reads that have ended since the last call, in the order in which they began. For rank 0."""
        # A later read may end while this looks at an earlier one, so it stops at the first that has not ended.
        ended = [*takewhile(lambda each: each[1].done(), self._reading.items())]
        for adapter_id, _ in ended:
            del self._reading[adapter_id]
        return [AdapterRead(adapter_id, _describe_error(future.exception())) for adapter_id, future in ended]

    def settle(self, read: AdapterRead, beat: Callable[[], None]) -> None:
        """Wait for this rank's read of an adapter that rank 0 has finished reading; send heartbeats while waiting.

        What rank 0 could not read is dropped. Raises ``AdapterReadFailed`` if this rank alone could not read it.
        """
        future = self._reading.pop(read.adapter_id)
        while True:
            try:
                error = _describe_error(future.exception(WAIT_SECONDS))
                break
            except TimeoutError:
                beat()
        if read.error and not error:
            self._registry.unregister_adapter(read.adapter_id)
        elif error and not read.error:
            raise AdapterReadFailed(f"this rank could not read an adapter that rank 0 has read: {error}")

    def close(self) -> None:
        """Stop the thread after the current read."""
        self._thread.shutdown(wait=True, cancel_futures=True)


def _describe_error(error: BaseException | None) -> str:
    """Return the reason of a failed read for the admin, and log what is not a fault of the adapter; "" for a success."""
    if error is None:
        return ""
    if isinstance(error, SkiffError):
        return str(error)
    log.error("adapter_read_failed", error=type(error).__name__, message=str(error))
    return f"{type(error).__name__}: {error}"
