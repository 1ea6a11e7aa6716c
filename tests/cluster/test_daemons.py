"""Background processes: found again by a later command, never mistaken for a stranger, gone when stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import ClusterError, wait_for
from daemons import Daemon, start_time
from paths import HERE


def test_a_later_command_finds_and_stops_it(tmp_path: Path) -> None:
    """The pid file is all that they share."""
    Daemon("sleeper", tmp_path).start(["sleep", "60"])
    found = Daemon("sleeper", tmp_path)
    pid = found.pid
    assert pid is not None
    assert found.alive()
    found.stop()
    assert start_time(pid) is None
    assert not found.alive()


def test_a_stranger_with_the_same_pid_is_left_alone(tmp_path: Path) -> None:
    """After a reboot another process may have the pid: its start time differs."""
    stranger = subprocess.Popen(["sleep", "60"])
    try:
        daemon = Daemon("sleeper", tmp_path)
        daemon.pid_file.write_text(f"{stranger.pid} 1")
        assert not daemon.alive()
        daemon.stop()
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_one_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    """Nothing outlives `stop`."""
    script = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    daemon = Daemon("deaf", tmp_path)
    daemon.start([sys.executable, "-c", script])
    wait_for("the process", lambda: "deaf" in daemon.log.read_text(), timeout_seconds=20)
    daemon.stop(grace_seconds=0.2)
    assert not daemon.alive()


def test_pause_stops_it_and_its_children_until_resume(tmp_path: Path) -> None:
    """The node's programs are children of nsenter, whose pid the file has."""
    daemon = Daemon("parent", tmp_path)
    daemon.start(["sh", "-c", "sleep 10 & echo $!; wait"])
    wait_for("the child", lambda: bool(daemon.log.read_text().strip()), timeout_seconds=20)
    pids = [daemon.pid, int(daemon.log.read_text())]
    daemon.pause()
    wait_for("the stop", lambda: all(state(pid) == "T" for pid in pids), timeout_seconds=20)
    daemon.resume()
    wait_for("the end of the stop", lambda: not any(state(pid) == "T" for pid in pids), timeout_seconds=20)
    daemon.stop()
    with pytest.raises(ClusterError, match="does not run"):
        daemon.pause()


def test_a_parent_that_stops_with_its_child_runs_after_resume(tmp_path: Path) -> None:
    """As nsenter does, here a moment after its child: the pause comes in between."""
    script = (
        "import os, signal, time\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    time.sleep(60)\n"
        "print(child, flush=True)\n"
        "while os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1]):\n"
        "    time.sleep(0.05)\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)\n"
        "    os.kill(child, signal.SIGCONT)\n"
    )
    daemon = Daemon("nsenter", tmp_path)
    daemon.start([sys.executable, "-c", script])
    wait_for("the child", lambda: bool(daemon.log.read_text().strip()), timeout_seconds=20)
    os.kill(int(daemon.log.read_text()), signal.SIGSTOP)
    time.sleep(0.01)  # the parent has noticed, and is about to stop
    daemon.pause()
    daemon.resume()
    time.sleep(1.0)
    assert state(daemon.pid) != "T"
    daemon.stop()


def state(pid: int | None) -> str:
    """Return a process's state, as in ps."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_dead_one_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    """The reason is in its output."""
    daemon = Daemon("broken", tmp_path)
    daemon.start(["sh", "-c", "echo no such port; exit 1"])
    wait_for("its end", lambda: not daemon.alive(), timeout_seconds=20)
    with pytest.raises(ClusterError, match="no such port"):
        daemon.require()


def test_it_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    """An interrupted test run leaves nothing behind."""
    script = (
        f"import sys, time; sys.path.insert(0, {str(HERE)!r})\n"
        "from pathlib import Path; from daemons import Daemon\n"
        f"Daemon('sleeper', Path({str(tmp_path)!r})).start(['sleep', '60'], with_parent=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script])
    daemon = Daemon("sleeper", tmp_path)
    wait_for("the daemon", daemon.alive, timeout_seconds=20)
    parent.kill()
    parent.wait()
    wait_for("its end", lambda: not daemon.alive(), timeout_seconds=20)
