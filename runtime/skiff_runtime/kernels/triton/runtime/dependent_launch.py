"""The start of a kernel before the end of those ahead of it: programmatic dependent launch, which NVIDIA's GPUs have from
compute capability 9.0 on.

A kernel so launched may run as soon as every program of the one before it runs and has said ``launch_dependents``. Until
``wait_for_dependencies`` it may read what no kernel writes, such as weights, and write nothing. From there on all before it
has finished: each of them waited in all its programs, or was launched in the plain way.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from skiff_runtime.kernels.triton.runtime.device_properties import architecture

FIRST_ARCHITECTURE = 90
LINE = tl.constexpr(128)
"""Bytes that a GPU's cache holds together."""


@triton.jit
def launch_dependents(PDL: tl.constexpr) -> None:
    """The kernel behind this one may start, and wait."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_dependencies(PDL: tl.constexpr) -> None:
    """Wait until what was launched before has ended, and can be read."""
    if PDL:
        gdc_wait()


@triton.jit
def prefetch(addresses: tl.tensor, PDL: tl.constexpr) -> None:
    """Let the lines of these addresses come into the GPU's cache, where nobody waits for them."""
    if PDL:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
            "=r,l",
            [addresses],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


def pdl_options(device: torch.device) -> dict[str, bool]:
    """What to launch a kernel with that takes ``PDL``."""
    if architecture(device) < FIRST_ARCHITECTURE:
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}
