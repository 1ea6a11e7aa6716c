"""The end of an ``LLM``: no wait is unbounded, and no process or file remains after a hang, Ctrl-C or exit."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from engine_driver import DEVICE
from gpus import needs_gpus
from interrupts import heed_interrupts
from llm_ranks import ranks_of
from rank_faults import RankFault, plant
from tiny_models import make_model

from skiff_runtime import LLM
from skiff_runtime.errors import StartupError, Unavailable
from skiff_runtime.grammar.compiler.compile_queue import GrammarCompileQueue
from skiff_runtime.messages.transport import Endpoints, Sender
from skiff_runtime.offline.engine_client import EngineClient

pytestmark = pytest.mark.integration

SCRIPT = """
import sys
from skiff_runtime import LLM

llm = LLM("demo://", device={device!r}, tp_size=2, max_total_tokens=4096, cpu_threads=1)
print(llm._engine.launch.run_dir, flush=True)
if {generates}:
    llm.generate(["Kubernetes is"] * 64, max_tokens=1500, ignore_eos=True, json_schema={{}}, n=2,
                 on_progress=lambda count: print("going", flush=True))
print("going", flush=True)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("endings"), "llama")


def all_gone(processes: list[psutil.Process], within_seconds: float = 15.0) -> bool:
    """Return whether every process ends within the time; a zombie counts as ended."""
    deadline = time.monotonic() + within_seconds
    while time.monotonic() < deadline:
        if not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in processes):
            return True
        time.sleep(0.05)
    return False


@needs_gpus(2)
def test_ctrl_c_ends_all_processes_and_removes_their_directory() -> None:
    """The processes are two ranks and the grammar compiler; the directory contains their sockets."""
    script = SCRIPT.format(device=DEVICE, generates=True)
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_interrupts,
    ) as started:
        assert started.stdout is not None and started.stderr is not None
        run_dir = Path(started.stdout.readline().strip())
        assert started.stdout.readline() == "going\n"
        children = psutil.Process(started.pid).children(recursive=True)
        assert len([each for each in children if "python" in each.name()]) == 3 and run_dir.is_dir()
        started.send_signal(signal.SIGINT)
        assert "KeyboardInterrupt" in started.stderr.read()
        assert started.wait(30) != 0
    assert all_gone(children)
    assert not run_dir.exists()


@needs_gpus(2)
def test_exit_without_close_removes_the_directory() -> None:
    script = SCRIPT.format(device=DEVICE, generates=False)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    run_dir, said = done.stdout.split()
    assert (done.returncode, said) == (0, "going"), done.stderr
    assert not Path(run_dir).exists()


def test_close_continues_after_one_of_its_steps_has_failed(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step can fail if Ctrl-C interrupts a change to the state that it closes."""
    llm = LLM(str(model), max_total_tokens=1024, cpu_threads=1)
    children = ranks_of(llm)

    def fail(compilations: GrammarCompileQueue) -> None:
        raise KeyError("closed in the middle of a change")

    monkeypatch.setattr(GrammarCompileQueue, "close", fail)
    with pytest.raises(KeyError):
        llm.close()
    assert all_gone(children)
    assert not llm._engine.launch.run_dir.exists()


@needs_gpus(2)
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (signal.SIGSTOP, r"rank1 has been silent for 3 s \(--rank-heartbeat-timeout-seconds\)"),
        (signal.SIGKILL, r"rank1 was killed by SIGKILL"),
    ],
)
def test_lost_rank_is_an_error_and_no_rank_is_left(model: Path, fault: signal.Signals, reason: str) -> None:
    """The other rank waits inside a collective, where it could end by SIGKILL alone."""
    options: dict[str, Any] = {
        "max_total_tokens": 1024,
        "cpu_threads": 1,
        "rank_heartbeat_timeout_seconds": 3,
    }
    with LLM(str(model), device=DEVICE, tp_size=2, **options) as llm:
        assert llm.generate([1], max_tokens=1, ignore_eos=True)
        ranks = ranks_of(llm)
        stream = llm.stream([1, 2], max_tokens=400, ignore_eos=True)
        next(stream)
        ranks[1].send_signal(fault)
        with pytest.raises(Unavailable, match=reason):
            list(stream)
        assert all_gone(ranks)
        with pytest.raises(Unavailable, match="killed by SIGKILL"):
            llm.generate([1], max_tokens=1)


@needs_gpus(2)
def test_rank_that_fails_to_start_is_an_error_and_no_rank_is_left(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in plant(tmp_path / "fault", 1, RankFault.NO_MEMORY).environment.items():
        monkeypatch.setenv(name, value)
    # Other tests' ranks leave a process behind, multiprocessing's resource tracker, which lives as long as this one.
    others = psutil.Process().children()
    with pytest.raises(StartupError, match=r"rank1 exited with code 1"):
        LLM(str(model), device=DEVICE, tp_size=2, max_total_tokens=1 << 18, cpu_threads=1)
    assert all_gone([child for child in psutil.Process().children() if child not in others])


def test_heartbeats_to_an_idle_llm_never_block_a_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ``LLM`` reads the reports of its ranks only during its calls, so their queue fills in between."""
    from skiff_runtime.messages import transport
    from skiff_runtime.processes import child_process as process
    from skiff_runtime.processes.launch import Role

    monkeypatch.setattr(transport, "QUEUE_MESSAGES", 5)
    monkeypatch.setattr(process, "HEARTBEAT_INTERVAL_SECONDS", 0.0)
    reports = transport.bind(Endpoints(tmp_path).supervisor)
    child = object.__new__(process.Child)
    child.role, child.name, child._last_beat = Role.RANK, "rank0", 0.0
    child._supervisor = Sender(Endpoints(tmp_path).supervisor, timeout_seconds=0.5)
    for _ in range(100):
        child.beat()
    child._supervisor.close()
    reports.close()


def test_close_after_garbage_collection_is_a_no_op(model: Path) -> None:
    llm = LLM(str(model), max_total_tokens=1024, cpu_threads=1)
    engine: EngineClient = llm._engine
    [rank] = ranks_of(llm)
    del llm
    engine.close()
    engine.close()
    assert all_gone([rank]) and not engine.launch.run_dir.exists()
