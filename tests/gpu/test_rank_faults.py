"""A rank that is killed, stopped, hung inside a step, slow, or plans other steps: clients, exit code and leftovers.

The ranks are GPUs with ``SKIFF_TEST_DEVICE=cuda``, otherwise processes on a CPU.
"""

import asyncio
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import pytest
from answers import Answer, read_answer
from gpu_memory import check_released, read_free_mib
from gpus import ON_GPU, needs_gpus
from rank_faults import PlantedFault, RankFault, plant
from raw_http import RawConnection, address_of, post
from service import Service, running_service, wait_until
from streaming_clients import CLIENTS, StreamEnd, collect_ends
from tiny_models import load_reference, make_model, oracle_choices
from tiny_tokenizer import VOCAB_SIZE
from watch import Family

from skiff_runtime.contract import EXIT_CHILD_DIED
from skiff_runtime.processes.resolve import count_gpus

pytestmark = [pytest.mark.integration, needs_gpus(2), *([pytest.mark.gpu] if ON_GPU else [])]

FULL: Final = () if ON_GPU else (pytest.mark.soak,)
"""On a CPU these are for ``make soak``, beside one of each kind in ``make test-integration``."""
CONTEXT: Final = 1 << 16 if ON_GPU else 1 << 12
"""Tokens of a stream that no test outlasts: a GPU computes some thousands of steps in a second."""
RANKS: Final = 4 if ON_GPU and count_gpus() >= 4 else 2
FLAGS: Final = (
    *("--served-model-name", "tiny", "--max-total-tokens", str(CONTEXT * CLIENTS)),
    *("--tp", str(RANKS)),
)
LIMIT_SECONDS: Final = 15.0
"""Most time from a fault to the last client's error, by the default of ``--rank-heartbeat-timeout-seconds``."""
GPU_DEFAULT: Final = () if ON_GPU else ("--rank-heartbeat-timeout-seconds", "10")
"""On a CPU the default of this option is larger."""
HEARTBEAT_SECONDS: Final = 3
STEP_SECONDS: Final = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), max_position_embeddings=CONTEXT)


@contextmanager
def failing_service(model: Path, *flags: str, environment: dict[str, str] | None = None) -> Iterator[Service]:
    """Serve with several ranks; check afterwards that the service has ended with its error, and that nothing is left."""
    free = read_free_mib()
    with running_service(model, *FLAGS, *flags, environment=environment) as service:
        family = Family.of(service)
        yield service
        assert service.wait_exit() == EXIT_CHILD_DIED, service.log_text()
        assert family.left() == []
        assert find_sockets(family) == []
        check_released(free)


def find_sockets(family: Family) -> list[str]:
    """Return what processes of the service left in the temporary directory or in shared memory, named by their ids."""
    ids = "|".join(str(each.pid) for each in family.processes)
    found = [*Path(tempfile.gettempdir()).iterdir(), *Path("/dev/shm").glob("*")]
    return [str(path) for path in found if re.search(rf"(^|[-_.])({ids})($|[-_.])", path.name)]


def fail_clients(service: Service, fault: Callable[[], object]) -> list[StreamEnd]:
    """Return the ends of streams during which the fault began."""
    return collect_ends(service, fault, tokens=CONTEXT - 64)


def check_errors(service: Service, ends: list[StreamEnd], reason: str) -> None:
    """Check that each client had one terminal event with the reason, and that the log has the same."""
    print(f"\n{reason}: {len(ends)} ends after {max(end.seconds for end in ends):.1f} s")
    assert [end for end in ends if not end.error] == []
    assert [end.error for end in ends if not re.search(reason, end.error or "")] == []
    assert len(ends) == CLIENTS
    wait_until(lambda: "service_failed" in service.log_text())
    assert re.search(rf"service_failed reason=\"{reason}", service.log_text())


def kill(service: Service, rank: int) -> None:
    ends = fail_clients(service, service.children[f"rank{rank}"].kill)
    check_errors(service, ends, rf".*rank{rank} was killed by SIGKILL")


@pytest.mark.parametrize("rank", [pytest.param(rank, marks=FULL) for rank in range(1, RANKS)])
def test_killed_rank(model: Path, rank: int) -> None:
    """The last fault of ``test_slow_ranks_and_a_suspended_service_give_the_right_answers`` is that of rank 0."""
    with failing_service(model) as service:
        kill(service, rank)


@pytest.mark.parametrize(
    ("rank", "flags", "seconds"),
    [
        (1, ("--rank-heartbeat-timeout-seconds", str(HEARTBEAT_SECONDS)), HEARTBEAT_SECONDS),
        *(pytest.param(rank, GPU_DEFAULT, 10, marks=FULL) for rank in range(RANKS)),
    ],
)
def test_stopped_rank(model: Path, rank: int, flags: tuple[str, ...], seconds: int) -> None:
    """The others wait for it inside a collective, or for its messages, and send heartbeats."""
    with failing_service(model, *flags) as service:
        ends = fail_clients(service, service.children[f"rank{rank}"].suspend)
        check_errors(
            service, ends, rf"rank{rank} has been silent for {seconds} s \(--rank-heartbeat-timeout-seconds\)"
        )
        assert max(end.seconds for end in ends) < LIMIT_SECONDS


@pytest.mark.parametrize("rank", [pytest.param(1, marks=FULL)])
def test_rank_that_stops_during_a_drain(model: Path, rank: int) -> None:
    def drain_and_stop(service: Service) -> None:
        service.process.send_signal(signal.SIGTERM)
        wait_until(lambda: service.http.get(service.url + "/readyz").status_code == 503)
        service.children[f"rank{rank}"].suspend()

    with failing_service(model, "--drain-timeout-seconds", "300", *GPU_DEFAULT) as service:
        ends = fail_clients(service, lambda: drain_and_stop(service))
        check_errors(service, ends, rf"rank{rank} has been silent for 10 s")


@pytest.mark.parametrize("rank", [1, *(pytest.param(rank, marks=FULL) for rank in range(RANKS) if rank != 1)])
def test_rank_that_hangs_in_a_step(model: Path, tmp_path: Path, rank: int) -> None:
    """Its main loop sends heartbeats, and so do the others, which wait for it inside a collective.

    Also on GPUs with peer memory: the least limit of a collective is larger than this limit on a step.
    """
    fault = plant(tmp_path / "fault", rank, RankFault.HANG)
    flags = ("--watchdog-timeout", str(STEP_SECONDS))
    with failing_service(model, *flags, environment=fault.environment) as service:
        ends = fail_clients(service, fault.begin)
        check_errors(
            service,
            ends,
            rf".*rank\d exited with code 1: step \d+, of {CLIENTS} tokens in {CLIENTS} rows, took longer than "
            rf"{STEP_SECONDS} s",
        )


def test_rank_that_plans_other_steps(model: Path, tmp_path: Path) -> None:
    fault = plant(tmp_path / "fault", 1, RankFault.DIVERGE)
    with failing_service(model, environment=fault.environment) as service:
        ends = fail_clients(service, fault.begin)
        check_errors(
            service,
            ends,
            r"rank1 exited with code 1: this rank planned other steps than rank 0: checksum [0-9a-f]{8}, not [0-9a-f]{8}",
        )


SLOW_CLIENTS: Final = 8
SLOW_TOKENS: Final = 12
SILENCE_SECONDS: Final = 4
"""Limit on the silence of a rank."""
PAUSE_SECONDS: Final = 2.0
"""A pause of one rank, shorter than the limit."""
SUSPENSION_SECONDS: Final = 7.0
"""A suspension of all processes, and a step, longer than the limit."""
STOPPED_SECONDS, RUNNING_SECONDS = 0.45, 0.05


def test_slow_ranks_and_a_suspended_service_give_the_right_answers(model: Path, tmp_path: Path) -> None:
    """Each rank in turn is stopped for seconds, then for nine tenths of the time.

    Then one step takes longer than a rank may be silent, and then all processes are suspended for longer than that. At
    last a rank is killed.
    """
    fault = plant(tmp_path / "fault", 1, RankFault.HANG)
    random = np.random.default_rng(5)
    prompts = [random.integers(2, VOCAB_SIZE, 20).tolist() for _ in range(SLOW_CLIENTS)]
    flags = ("--rank-heartbeat-timeout-seconds", str(SILENCE_SECONDS))
    with failing_service(model, *flags, environment=fault.environment) as service:
        for delay in (
            *(slowed(service.children[f"rank{rank}"]) for rank in range(RANKS)),
            long_step(fault),
            suspended([psutil.Process(service.process.pid), *service.children.values()]),
        ):
            with delay:
                answers = asyncio.run(request_all(service, prompts))
            assert all(answer.finished for answer in answers), service.log_text()
            outputs = [answer.choices[0].tokens for answer in answers]
            assert all(len(output) == SLOW_TOKENS for output in outputs)
            assert outputs == oracle_choices(load_reference(model), prompts, outputs)
        kill(service, 0)


@contextmanager
def long_step(fault: PlantedFault) -> Iterator[None]:
    """Have one rank begin a step late, for which the other waits inside a collective."""
    fault.begin()
    timer = threading.Timer(SUSPENSION_SECONDS, fault.end)
    timer.start()
    try:
        yield
    finally:
        timer.join()


@contextmanager
def suspended(processes: list[psutil.Process]) -> Iterator[None]:
    """Suspend all processes, the supervisor first, while requests arrive; resume them in the reverse order."""
    for process in processes:
        process.suspend()

    def resume() -> None:
        for process in reversed(processes):
            process.resume()

    timer = threading.Timer(SUSPENSION_SECONDS, resume)
    timer.start()
    try:
        yield
    finally:
        timer.join()


@contextmanager
def slowed(process: psutil.Process) -> Iterator[None]:
    """Run the process for a tenth of the time, after a pause."""
    over = threading.Event()

    def alternate() -> None:
        stopped = PAUSE_SECONDS
        while not over.is_set():
            process.suspend()
            over.wait(stopped)
            process.resume()
            time.sleep(RUNNING_SECONDS)
            stopped = STOPPED_SECONDS

    thread = threading.Thread(target=alternate)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


async def request_all(service: Service, prompts: list[list[int]]) -> list[Answer]:
    """Send all prompts at once, and return their greedy answers."""
    return await asyncio.gather(*(request_one(service, prompt) for prompt in prompts))


async def request_one(service: Service, prompt: list[int]) -> Answer:
    body: dict[str, Any] = {"token_ids": prompt, "max_tokens": SLOW_TOKENS, "temperature": 0}
    line = await RawConnection.open(address_of(service.url))
    line.send(post("/generate", {**body, "ignore_eos": True, "stream": False}))
    answer = read_answer(await line.reply(120.0))
    line.cut()
    return answer
