"""Messages between the supervisor and its children: start, heartbeats and end of a service."""

from msgspec import Struct


class Heartbeat(Struct, frozen=True, tag="beat", array_like=True):
    """child -> supervisor, about once a second, from the child's main loop.

    ``pause_seconds``: the main loop is about to do something that may take this long, and sends nothing meanwhile.
    """

    process: str
    pause_seconds: float = 0.0


class PhaseReport(Struct, frozen=True, tag="phase", array_like=True):
    """child -> supervisor -> api: the child entered a start phase, after ``seconds`` in the one before, or progressed in it."""

    process: str
    phase: str
    seconds: float
    progress: float = 0.0


class Ready(Struct, frozen=True, tag="ready", array_like=True):
    """child -> supervisor: this process is ready. ``kv_tokens``: a rank's KV capacity; ``port``: where the api listens."""

    process: str
    kv_tokens: int = 0
    port: int = 0


class ProcessHealth(Struct, frozen=True, tag="beats", array_like=True):
    """supervisor -> api, about once a second: each process, the age of its last message in seconds, and if it runs."""

    processes: list[str]
    ages: list[float]
    running: list[bool]


class ProcessFailed(Struct, frozen=True, tag="process_failed", array_like=True):
    """child -> supervisor: the reason for which this process ends, in its last message."""

    process: str
    message: str


class ServiceReady(Struct, frozen=True, tag="service_ready", array_like=True):
    """supervisor -> api: every process is ready."""

    kv_tokens: int


class Serving(Struct, frozen=True, tag="serving", array_like=True):
    """api -> supervisor, after ``ServiceReady``: requests are accepted from now on."""

    process: str


class Drain(Struct, frozen=True, tag="drain", array_like=True):
    """supervisor -> api: refuse new requests, finish the others, then exit."""

    timeout_seconds: float


class ServiceFailed(Struct, frozen=True, tag="service_failed", array_like=True):
    """supervisor -> api: end every request with this message, then exit."""

    message: str
