"""The processes of a service whose CPU time the benchmarks read."""

import os
import sys

import psutil

from skiff_runtime.bench.cpu_time import identify_child


def test_child_that_has_ended_is_no_process_of_a_service() -> None:
    """Its parent has not waited for it yet, so it still has a process id, and no command line."""
    pid = os.posix_spawn(sys.executable, [sys.executable, "-c", ""], os.environ)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    try:
        assert psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        assert identify_child(psutil.Process(pid)) is None
    finally:
        os.waitpid(pid, 0)
