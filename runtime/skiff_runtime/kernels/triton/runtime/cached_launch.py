"""Repeated launches of one kernel with less work for the host.

Triton looks at every argument of every launch to choose among the variants that it has compiled. Attention in
steps with prompts is not captured in a CUDA graph; there that was a tenth of the engine thread's work for Qwen3-0.6B.
"""

from functools import lru_cache
from typing import Any, Final

import torch
import triton

ALIGNMENT: Final = 16
"""Bytes. Triton compiles a variant for tensors whose addresses are multiples of it, and that variant cannot take
others."""

MAX_LAUNCHES: Final = 1024
"""The launches that ``launch`` keeps: some of each size of a step that occurs, and of each kind of layer."""

Grid = tuple[int, int, int]
LayerKV = tuple[torch.Tensor, torch.Tensor]
"""K and V of one layer's pool, each [tokens of the pool, kv_heads, d]."""


class CachedLaunch:
    """A kernel with its grid, its numbers and its options; a call adds the tensors.

    The parameters of the kernel must be tensors, numbers and constexprs, in this order. The first call launches
    through Triton and keeps the compiled kernel; later calls launch that directly, if their tensors are aligned like
    the first ones. Their types must be the same.
    """

    def __init__(self, kernel: triton.JITFunction, grid: Grid, *numbers: float, **options: Any) -> None:
        """``options`` are the constexprs and launch options such as ``num_warps``, by name."""
        self._kernel = kernel
        self._grid = grid
        self._numbers = numbers
        self._options = options
        self._constexprs = tuple(options[name] for name in kernel.arg_names if name in options)
        self._compiled: Any = None
        self._aligned: list[bool] = []

    def __call__(self, *tensors: torch.Tensor) -> None:
        aligned = [each.data_ptr() % ALIGNMENT == 0 for each in tensors]
        if self._compiled is not None and aligned == self._aligned:
            self._compiled[self._grid](*tensors, *self._numbers, *self._constexprs)
            return
        # Triton's interpreter returns None: there, every launch takes this way.
        self._compiled = self._kernel[self._grid](*tensors, *self._numbers, **self._options)
        self._aligned = aligned


def launch(
    kernel: triton.JITFunction,
    grid: Grid,
    tensors: tuple[torch.Tensor, ...],
    numbers: tuple[float, ...],
    **options: Any,
) -> None:
    """Launch like a ``CachedLaunch`` that an earlier call with the same kernel, sizes and types has left.

    For kernels that are launched from functions, without an object that lasts for a step. The layers of a model have
    the same sizes, so one of them launches through Triton, and all others directly.
    """
    dtypes = tuple(each.dtype for each in tensors)
    _prepare(kernel, grid, numbers, tensors[0].device, dtypes, tuple(options.items()))(*tensors)


@lru_cache(maxsize=MAX_LAUNCHES)
def _prepare(
    kernel: triton.JITFunction,
    grid: Grid,
    numbers: tuple[float, ...],
    _device: torch.device,
    _dtypes: tuple[torch.dtype, ...],
    options: tuple[tuple[str, Any], ...],
) -> CachedLaunch:
    return CachedLaunch(kernel, grid, *numbers, **dict(options))
