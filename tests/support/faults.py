"""Faults of processes, and what must be true of a service afterwards."""

import asyncio
import time
from enum import StrEnum
from typing import Final

import psutil
from raw_http import address_of, post, send_request
from service import Service
from stages import Clients, Ending
from watch import Family, alive, grammar_process, nothing_held

from skiff_runtime.contract import EXIT_CHILD_DIED

HEARTBEAT_SECONDS: Final = 4
STEP_SECONDS: Final = 60
GRAMMAR_SECONDS: Final = 3
DEADLINE_SECONDS: Final = 15
FLAGS: Final = (
    "--heartbeat-timeout-seconds",
    str(HEARTBEAT_SECONDS),
    "--watchdog-timeout",
    str(STEP_SECONDS),
    "--grammar-timeout-seconds",
    str(GRAMMAR_SECONDS),
    "--log-level",
    "debug",
)
LATEST_SECONDS: Final = 45
"""Deadline, the five seconds in which its end is confirmed, and what a busy machine adds."""
FLOOD: Final = 300
SLOW_SECONDS: Final = 6.0
_STOPPED_SECONDS: Final = 0.45
_GOING_SECONDS: Final = 0.05

PROBE: Final = {
    "text": "A pod starts,",
    "max_tokens": 8,
    "temperature": 0,
    "guided_json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
}

PARDONED: Final = {
    "queue_full": ("flood",),
    "invalid_grammar": ("tokenizing",),
    "request_timeout": ("queued", "flood"),
}
"""Errors by code that a fault which passes may cause, and the stages at which it may."""

PROCESSES: Final = ("api", "tokenizer0", "detokenizer", "rank0", "rank1", "grammar")


class Fault(StrEnum):
    """What happens to a process. SLOW: it gets a tenth of its time; FLOOD: it stops while requests pour in."""

    KILL = "kill"
    STOP = "stop"
    SLOW = "slow"
    FLOOD = "flood"


def is_fatal(process: str, fault: Fault) -> bool:
    """Whether the service has to end: the compiler of grammars is replaced, and who is slow is waited for."""
    return process != "grammar" and fault is not Fault.SLOW


def victim_of(service: Service, process: str) -> psutil.Process:
    """The process by name; the compiler of grammars runs once a new grammar came, and until it is lost."""
    if process != "grammar":
        return service.children[process]
    compiler = grammar_process(service)
    assert compiler is not None, "no compiler runs"
    return compiler


async def inject(service: Service, process: str, fault: Fault, *, salt: int) -> list[Ending]:
    """Clients at every stage, then the fault; how each client ended."""
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
    """Let the process run for a tenth of the time only."""
    until = time.monotonic() + SLOW_SECONDS
    while time.monotonic() < until and alive(victim):
        victim.suspend()
        await asyncio.sleep(_STOPPED_SECONDS)
        victim.resume()
        await asyncio.sleep(_GOING_SECONDS)


def judge(endings: list[Ending], process: str, fault: Fault) -> list[str]:
    """Who was not told how its request ended, by one terminal reply in time; or had an error without need."""
    return [str(each) for each in endings if not _told(each, process, fault)]


def _told(ending: Ending, process: str, fault: Fault) -> bool:
    """A connection that just ends tells enough only where nobody is left who could say more.

    That is when the api process itself is lost, and when a service that ends does not wait for who reads slowly.
    """
    answer = ending.answer
    if answer is None or ending.seconds > LATEST_SECONDS:
        return False
    over = is_fatal(process, fault)
    if answer.terminal:
        return over or answer.finished or ending.stage in PARDONED.get(answer.code or "", ())
    return answer.cut and over and (process == "api" or ending.stage in ("slow_reader", "flood"))


def judge_end(service: Service, family: Family) -> list[str]:
    """What is wrong with a service that had to end."""
    code = service.wait_exit()
    wrong = [] if code == EXIT_CHILD_DIED else [f"exit code {code}, not {EXIT_CHILD_DIED}"]
    return wrong + family.left()


def probe(service: Service) -> bytes:
    """What a healthy service answers to one small question, through every process."""
    reply = asyncio.run(send_request(address_of(service.url), post("/generate", PROBE)))
    assert reply.status == 200, reply
    return reply.body.partition(b'"text"')[2].partition(b'"usage"')[0]


def judge_recovery(service: Service, before: bytes) -> list[str]:
    """What is wrong with a service that had to go on."""
    if service.process.poll() is not None:
        return [f"it ended: {service.log_text()[-2000:]}"]
    nothing_held(service)
    after = probe(service)
    return [] if after == before else [f"it answers {after!r}, no longer {before!r}"]
