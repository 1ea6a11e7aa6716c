"""Launches of one kernel time after time, with less work for the host than Triton's own way, which looks at every
argument each time to choose among what it has compiled."""

from typing import Any, Final

import torch
import triton

ALIGNMENT: Final = 16
"""Bytes; a kernel compiled for tensors that begin at a multiple of it cannot take others."""

Grid = tuple[int, int, int]


class Repeated:
    """A kernel whose ``options`` (compile-time constants, warps and the like) stay, as do all its numbers.

    What is compiled at the first launch is launched directly from then on, with tensors of the same types that begin at
    such places as the first ones did. Constants stand behind all other parameters of the kernel.
    """

    def __init__(self, kernel: triton.JITFunction, grid: Grid, **options: Any) -> None:
        self._kernel = kernel
        self._grid = grid
        self._options = options
        self._constants = tuple(options[name] for name in kernel.arg_names if name in options)
        self._compiled: Any = None
        self._places: list[bool] = []

    def __call__(self, *arguments: torch.Tensor | float) -> None:
        places = [each.data_ptr() % ALIGNMENT == 0 for each in arguments if isinstance(each, torch.Tensor)]
        if self._compiled is not None and places == self._places:
            self._compiled[self._grid](*arguments, *self._constants)
        else:
            # Nothing is compiled where kernels are interpreted.
            self._compiled = self._kernel[self._grid](*arguments, **self._options)
            self._places = places
