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
_ISA_VARIABLE: Final = "ONEDNN_MAX_CPU_ISA"
_WITHOUT_AMX: Final = "AVX512_CORE_BF16"


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
