"""``LLM`` never waits for ever and leaves nothing behind: a hung rank, Ctrl-C, a script that just ends."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from interrupts import heed_interrupts
from llm_ranks import ranks_of
from tiny_models import make_model

from skiff_runtime import LLM
from skiff_runtime.errors import Unavailable
from skiff_runtime.grammar.compiler.compile_queue import GrammarCompileQueue
from skiff_runtime.messages.transport import Endpoints, Sender
from skiff_runtime.offline.engine_client import EngineClient

SCRIPT = """
import sys
from skiff_runtime import LLM

llm = LLM("demo://", tp_size=2, max_total_tokens=4096, cpu_threads=1)
print(llm._backend.launch.run_dir, flush=True)
if {asks}:
    llm.generate(["Kubernetes is"] * 64, max_tokens=1500, ignore_eos=True, json_schema={{}}, n=2,
                 on_progress=lambda count: print("going", flush=True))
print("going", flush=True)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("endings"), "llama")


def all_gone(processes: list[psutil.Process], within_seconds: float = 15.0) -> bool:
    """Whether every process ends; a zombie that nobody has reaped counts as ended."""
    deadline = time.monotonic() + within_seconds
    while time.monotonic() < deadline:
        if not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in processes):
            return True
        time.sleep(0.05)
    return False


def test_ctrl_c_leaves_nothing_behind() -> None:
    """Neither the ranks nor the compiler of grammars, nor the directory of sockets."""
    script = SCRIPT.format(asks=True)
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
        assert len(children) == 3 and run_dir.is_dir()
        started.send_signal(signal.SIGINT)
        assert "KeyboardInterrupt" in started.stderr.read()
        assert started.wait(30) != 0
    assert all_gone(children)
    assert not run_dir.exists()


def test_a_script_that_closes_nothing_leaves_nothing() -> None:
    script = SCRIPT.format(asks=False)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    run_dir, said = done.stdout.split()
    assert (done.returncode, said) == (0, "going"), done.stderr
    assert not Path(run_dir).exists()


def test_an_ending_that_fails_in_part_is_done_in_all_others(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C may come in the middle of a change to what is to be closed."""
    llm = LLM(str(model), max_total_tokens=1024, cpu_threads=1)
    children = ranks_of(llm)

    def fail(compilations: GrammarCompileQueue) -> None:
        raise KeyError("closed in the middle of a change")

    monkeypatch.setattr(GrammarCompileQueue, "close", fail)
    with pytest.raises(KeyError):
        llm.close()
    assert all_gone(children)
    assert not llm._backend.launch.run_dir.exists()


def test_a_rank_that_hangs_is_an_error(model: Path) -> None:
    with LLM(str(model), tp_size=2, max_total_tokens=1024, cpu_threads=1, heartbeat_timeout_seconds=5) as llm:
        assert llm.generate([1], max_tokens=1, ignore_eos=True)
        ranks = ranks_of(llm)
        ranks[1].send_signal(signal.SIGSTOP)
        with pytest.raises(Unavailable, match=r"rank\d has been silent for 5 s"):
            llm.generate([1, 2], max_tokens=50, ignore_eos=True)
        assert all_gone(ranks)
        with pytest.raises(Unavailable, match="killed by SIGKILL"):
            llm.generate([1], max_tokens=1)


def test_beats_of_a_long_idle_never_fill_a_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody reads the reports of an ``LLM`` that is not asked anything; a rank must not mind."""
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


def test_closing_twice_and_the_garbage_collector_do_no_harm(model: Path) -> None:
    llm = LLM(str(model), max_total_tokens=1024, cpu_threads=1)
    backend: EngineClient = llm._backend
    [rank] = ranks_of(llm)
    del llm
    backend.close()
    backend.close()
    assert all_gone([rank]) and not backend.launch.run_dir.exists()
