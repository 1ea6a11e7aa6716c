"""Launches of one kernel time after time, with less work for the host than Triton's own way, which looks at every
argument each time to choose among what it has compiled."""

from typing import Any, Final

import torch
import triton

ALIGNMENT: Final = 16
"""Bytes; a kernel compiled for tensors that begin at a multiple of it cannot take others."""

Grid = tuple[int, int, int]
LayerKV = tuple[torch.Tensor, torch.Tensor]
"""K and V of a layer, each [tokens of the pool, kv_heads, d]."""


class CachedLaunch:
    """A kernel with all that stays: its ``numbers``, and its ``options``, which are constants, warps and the like.

    What is compiled at the first launch is launched directly from then on, with tensors of the same types that begin at
    such places as the first ones did. A kernel's parameters are tensors, numbers and constants, in this order.
    """

    def __init__(self, kernel: triton.JITFunction, grid: Grid, *numbers: float, **options: Any) -> None:
        self._kernel = kernel
        self._grid = grid
        self._numbers = numbers
        self._options = options
        self._constants = tuple(options[name] for name in kernel.arg_names if name in options)
        self._compiled: Any = None
        self._places: list[bool] = []

    def __call__(self, *tensors: torch.Tensor) -> None:
        places = [each.data_ptr() % ALIGNMENT == 0 for each in tensors]
        if self._compiled is not None and places == self._places:
            self._compiled[self._grid](*tensors, *self._numbers, *self._constants)
            return
        # None where kernels are interpreted.
        self._compiled = self._kernel[self._grid](*tensors, *self._numbers, **self._options)
        self._places = places
