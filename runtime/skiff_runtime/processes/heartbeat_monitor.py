"""The heartbeat monitor: by it the parent of a service's processes notices that one of them hangs or is stopped.

On GPUs a rank has a shorter limit than the other processes. Its main loop plans steps and waits for them, but computes
nothing, so it is never busy for long; a tokenizer may be, with a long prompt. While a rank is silent, the other ranks
wait for it inside a collective, and every request of the service waits with them.
"""

import time
from collections.abc import Callable, Iterable
from typing import Final

from skiff_runtime.config import Config, flag
from skiff_runtime.messages import Heartbeat, PhaseReport, ProcessFailed, Ready, Serving
from skiff_runtime.processes.launch import Role

ChildReport = Heartbeat | PhaseReport | Ready | Serving | ProcessFailed
MAX_TURN_SECONDS: Final = 2.0
"""Most time that one turn of the parent's loop, which waits for a second at most, adds to the processes' silence."""


class HeartbeatMonitor:
    """Measures the silence of each process: the time since its last message, as far as this process itself ran.

    If the whole container or machine is suspended, or the caller of an ``LLM`` is busy elsewhere, this process reads no
    messages either, and the silence of the others means nothing. Therefore a turn counts for ``MAX_TURN_SECONDS`` at
    most, however long it took.
    """

    def __init__(self, config: Config, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._turn_began = clock()
        self._now = 0.0
        self._last_message: dict[str, float] = {}
        self._paused_until: dict[str, float] = {}

    def begin_turn(self) -> None:
        """Count the time since the last turn. To be called before the messages of a turn are recorded."""
        now = self._clock()
        self._now += min(now - self._turn_began, MAX_TURN_SECONDS)
        self._turn_began = now

    def record(self, message: ChildReport) -> None:
        """Record a message of a process. A ``Heartbeat`` may announce a pause, which its silence does not include."""
        self._last_message[message.process] = self._now
        pause = message.pause_seconds if isinstance(message, Heartbeat) else 0.0
        self._paused_until[message.process] = self._now + pause

    def ages(self) -> dict[str, float]:
        """Return the seconds since the last message of each process that has sent one."""
        return {process: self._now - at for process, at in self._last_message.items()}

    def describe_silence(self, processes: Iterable[str]) -> str | None:
        """Return a sentence about the first of ``processes`` that has been silent for too long; None if none has."""
        for process in processes:
            name = "rank_heartbeat_timeout_seconds" if _is_rank(process) else "heartbeat_timeout_seconds"
            limit: float | None = getattr(self._config, name)
            assert limit is not None, "the configuration is resolved"
            if self._now - self._paused_until[process] > limit:
                return f"{process} has been silent for {limit:g} s ({flag(name)})"
        return None


def _is_rank(process: str) -> bool:
    return process.startswith(Role.RANK)
