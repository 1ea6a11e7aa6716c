"""Prepares a process to compute on a CPU."""

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
SMALL_MODEL: Final = 1 << 25
"""Parameters that stay in a core's reach; to read more, several cores are faster than one at any step."""
SMALL_STEP: Final = 1_500_000_000
"""Multiplications."""
_ISA_VARIABLE: Final = "ONEDNN_MAX_CPU_ISA"
_WITHOUT_AMX: Final = "AVX512_CORE_BF16"


class StepThreads:
    """How many threads compute a step: a small one of a small model is done sooner by one than shared out to several.

    For the demo model on two cores, that is so up to some 300 tokens; docs/benchmarks.md has the times.
    """

    def __init__(self, most: int, parameters: int) -> None:
        """``most`` threads, for a model of so many ``parameters`` on this rank."""
        small = most > 1 and parameters <= SMALL_MODEL
        self._most = most
        self._alone = SMALL_STEP // max(1, parameters) if small else 0
        self._now = most

    def choose(self, tokens: int) -> None:
        """Get this thread ready to compute a step of so many tokens."""
        wanted = 1 if tokens <= self._alone else self._most
        if wanted != self._now:
            self._now = wanted
            torch.set_num_threads(wanted)


def avoid_trapping_amx() -> None:
    """Keep oneDNN off AMX on machines that announce it and yet kill who uses it.

    Some virtual machines pass the CPU's feature bits through but trap the instructions; a
    bfloat16 product then ends the process with SIGILL. oneDNN reads its variable at
    the first product, so this must come before any. A value set by the user is left alone.
    """
    if _ISA_VARIABLE in os.environ or "amx_tile" not in Path("/proc/cpuinfo").read_text().split():
        return
    if not _survives_product():
        os.environ[_ISA_VARIABLE] = _WITHOUT_AMX
        log.warning("amx_disabled", reason="this machine announces AMX, but the instructions trap")


def _survives_product() -> bool:
    """Whether a child process lives through a bfloat16 product."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        faulthandler.disable()
        torch.set_num_threads(1)
        square = torch.ones(64, 64, dtype=torch.bfloat16)
        F.linear(square, square)
        os._exit(0)
    return _exit_code(child) == 0


def _exit_code(child: int) -> int:
    """Wait for the child, at most ``PROBE_SECONDS``; then it is killed."""
    deadline = time.monotonic() + PROBE_SECONDS
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
