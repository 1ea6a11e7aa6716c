"""The start of a kernel before the end of those ahead of it: programmatic dependent launch, which NVIDIA's GPUs have from
compute capability 9.0 on.

A kernel so launched may run as soon as every program of the one before it runs and has said ``let_next_start``. Until
``await_previous`` it may read what no kernel writes, such as weights, and write nothing. From there on all before it
has finished: each of them waited in all its programs, or was launched in the plain way.
"""

from functools import cache

import torch
import triton
import triton.language as tl

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # Triton before 3.4
    gdc_launch_dependents = gdc_wait = None

FIRST_ARCHITECTURE = 90


@triton.jit
def let_next_start(EARLY: tl.constexpr) -> None:
    """The kernel behind this one may start, and wait."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def await_previous(EARLY: tl.constexpr) -> None:
    """Wait until what was launched before has ended, and can be read."""
    if EARLY:
        gdc_wait()


@cache
def launch_options(device: torch.device) -> dict[str, bool]:
    """What to launch a kernel with that takes ``EARLY``."""
    if device.type != "cuda" or gdc_wait is None:
        return {"EARLY": False}
    target = triton.runtime.driver.active.get_current_target()
    if target.backend != "cuda" or target.arch < FIRST_ARCHITECTURE:
        return {"EARLY": False}
    return {"EARLY": True, "launch_pdl": True}
