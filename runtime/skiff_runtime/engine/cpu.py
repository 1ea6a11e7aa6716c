"""Preparation of a process to compute on a CPU: the number of threads of a step, and AMX."""

import faulthandler
import os
import signal
import time
import warnings
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F

from skiff_runtime import log

PROBE_SECONDS: Final = 20.0
SMALL_MODEL_PARAMETERS: Final = 1 << 25
"""Parameters that stay in a core's caches. To read more, several cores are faster than one for any step."""
SMALL_STEP_MULTIPLICATIONS: Final = 1_500_000_000
_ISA_VARIABLE: Final = "ONEDNN_MAX_CPU_ISA"
_WITHOUT_AMX: Final = "AVX512_CORE_BF16"


class StepThreads:
    """The number of threads that compute a step: one thread finishes a small step of a small model sooner than several.

    For the demo model on two cores this holds up to about 300 tokens; docs/lab/scheduling.md has the times.
    """

    def __init__(self, max_threads: int, parameters: int) -> None:
        """``parameters`` are those of the model on this rank."""
        is_small = max_threads > 1 and parameters <= SMALL_MODEL_PARAMETERS
        self._max_threads = max_threads
        self._max_single_tokens = SMALL_STEP_MULTIPLICATIONS // max(1, parameters) if is_small else 0
        self._current = max_threads

    def set_for(self, tokens: int) -> None:
        """Set the calling thread's number of threads for a step of ``tokens`` tokens."""
        threads = 1 if tokens <= self._max_single_tokens else self._max_threads
        if threads != self._current:
            self._current = threads
            torch.set_num_threads(threads)


def avoid_trapping_amx() -> None:
    """Keep oneDNN from using AMX on machines that announce it but trap its instructions.

    Some virtual machines pass the CPU's feature bits through and trap the instructions: a bfloat16 matrix product then
    ends the process with SIGILL. oneDNN reads its variable at the first product, so this must be called before it. A
    value that the user has set is kept.
    """
    if _ISA_VARIABLE in os.environ or "amx_tile" not in Path("/proc/cpuinfo").read_text().split():
        return
    if not _survives_product():
        os.environ[_ISA_VARIABLE] = _WITHOUT_AMX
        log.warning("amx_disabled", reason="this machine announces AMX, but the instructions trap")


def _survives_product() -> bool:
    """Return whether a child process survives a bfloat16 matrix product."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        faulthandler.disable()
        torch.set_num_threads(1)
        square = torch.ones(64, 64, dtype=torch.bfloat16)
        F.linear(square, square)
        os._exit(0)
    return _wait_for_exit(child) == 0


def _wait_for_exit(child: int) -> int:
    """Wait for the child at most ``PROBE_SECONDS``, then kill it; return its exit code."""
    deadline = time.monotonic() + PROBE_SECONDS
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
