"""Faults of processes, and checks of the service afterwards."""

import asyncio
import time
from enum import StrEnum
from typing import Final

import psutil
from raw_http import address_of, post, send_request
from service import Service
from stages import Clients, Ending
from watch import Family, check_nothing_held, grammar_process, is_alive

from skiff_runtime.contract import EXIT_CHILD_DIED

HEARTBEAT_SECONDS: Final = 4
STEP_SECONDS: Final = 60
GRAMMAR_SECONDS: Final = 3
DEADLINE_SECONDS: Final = 15
FLAGS: Final = (
    "--heartbeat-timeout-seconds",
    str(HEARTBEAT_SECONDS),
    "--rank-heartbeat-timeout-seconds",
    str(HEARTBEAT_SECONDS),
    "--watchdog-timeout",
    str(STEP_SECONDS),
    "--grammar-timeout-seconds",
    str(GRAMMAR_SECONDS),
    "--log-level",
    "debug",
)
LATEST_SECONDS: Final = 45
"""Time limit for every ending: the deadline, five seconds to confirm it, and the delays of a busy machine."""
FLOOD: Final = 300
SLOW_SECONDS: Final = 6.0
_STOPPED_SECONDS: Final = 0.45
_RUNNING_SECONDS: Final = 0.05

PROBE: Final = {
    "text": "A pod starts,",
    "max_tokens": 8,
    "temperature": 0,
    "guided_json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
}

ALLOWED_ERRORS: Final = {
    "queue_full": ("flood",),
    "invalid_grammar": ("tokenizing",),
    "request_timeout": ("queued", "flood", "tokenizing"),
}
"""Error codes that a survivable fault may cause, with the stages at which it may.

A request at the tokenizing stage waits for the successor of its grammar compiler, which a busy machine may start later
than the request's deadline.
"""

PROCESSES: Final = ("api", "tokenizer0", "detokenizer", "rank0", "rank1", "grammar")


class Fault(StrEnum):
    """A fault of a process. SLOW: it runs a tenth of the time; FLOOD: it is stopped while many requests arrive."""

    KILL = "kill"
    STOP = "stop"
    SLOW = "slow"
    FLOOD = "flood"


def is_fatal(process: str, fault: Fault) -> bool:
    """Return whether the service must end: a grammar compiler is replaced, and a slow process is waited for."""
    return process != "grammar" and fault is not Fault.SLOW


def victim_of(service: Service, process: str) -> psutil.Process:
    """Return the process by name. The grammar compiler runs from the first new grammar until it is killed."""
    if process != "grammar":
        return service.children[process]
    compiler = grammar_process(service)
    assert compiler is not None, "no compiler runs"
    return compiler


async def inject(service: Service, process: str, fault: Fault, *, salt: int) -> list[Ending]:
    """Bring clients to every stage, inject the fault, and return the clients' endings."""
    fresh = {"type": "object", "properties": {f"b{salt}": {"type": "null"}}}
    await send_request(address_of(service.url), post("/generate", {**PROBE, "guided_json": fresh}))
    victim = victim_of(service, process)
    clients = Clients(service, DEADLINE_SECONDS, salt)
    await clients.place()
    if fault is Fault.SLOW:
        clients.release()
        await _slow(victim)
        return await clients.endings()
    victim.kill() if fault is Fault.KILL else victim.suspend()
    if process != "tokenizer0":
        clients.release()
    if fault is Fault.FLOOD:
        await clients.pour(FLOOD)
    return await clients.endings()


async def _slow(victim: psutil.Process) -> None:
    """Let the process run for a tenth of the time."""
    until = time.monotonic() + SLOW_SECONDS
    while time.monotonic() < until and is_alive(victim):
        victim.suspend()
        await asyncio.sleep(_STOPPED_SECONDS)
        victim.resume()
        await asyncio.sleep(_RUNNING_SECONDS)


def judge(endings: list[Ending], process: str, fault: Fault) -> list[str]:
    """Return the endings that are wrong: no single terminal reply in time, or an error that the fault does not justify."""
    return [str(each) for each in endings if not _is_valid(each, process, fault)]


def _is_valid(ending: Ending, process: str, fault: Fault) -> bool:
    """Return whether a client's ending is valid.

    A cut connection without a terminal reply is valid only if the api process itself is lost, or if the service
    ends and does not wait for a client that reads slowly.
    """
    answer = ending.answer
    if answer is None or ending.seconds > LATEST_SECONDS:
        return False
    over = is_fatal(process, fault)
    if answer.terminal:
        return over or answer.finished or ending.stage in ALLOWED_ERRORS.get(answer.code or "", ())
    return answer.cut and over and (process == "api" or ending.stage in ("slow_reader", "flood"))


def judge_end(service: Service, family: Family) -> list[str]:
    """Return what is wrong with a service that had to end."""
    code = service.wait_exit()
    wrong = [] if code == EXIT_CHILD_DIED else [f"exit code {code}, not {EXIT_CHILD_DIED}"]
    return wrong + family.left()


def probe(service: Service) -> bytes:
    """Return the answer to a small request that passes through every process."""
    reply = asyncio.run(send_request(address_of(service.url), post("/generate", PROBE)))
    assert reply.status == 200, reply
    return reply.body.partition(b'"text"')[2].partition(b'"usage"')[0]


def judge_recovery(service: Service, before: bytes) -> list[str]:
    """Return what is wrong with a service that had to survive."""
    if service.process.poll() is not None:
        return [f"it ended: {service.log_text()[-2000:]}"]
    check_nothing_held(service)
    after = probe(service)
    return [] if after == before else [f"it answers {after!r}, no longer {before!r}"]
