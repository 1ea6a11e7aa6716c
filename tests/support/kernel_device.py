"""Where tests of Triton kernels run: on the GPU there is, else in Triton's interpreter on the CPU."""

from typing import Any, Final

import pytest
import torch

pytest.importorskip("triton", reason="builds of torch for CPUs may come without Triton")

DEVICE: Final = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE: Final = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""Relative errors, in the norm, that rounding explains."""


def error(value: torch.Tensor, expected: torch.Tensor) -> float:
    """The distance of ``value`` from ``expected``, relative to its size; NaN where anything is NaN."""
    wide, wanted = value.double().cpu(), expected.double().cpu()
    return float((wide - wanted).norm() / wanted.norm())


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """NaN in every place, so that what is not written shows."""
    return tensor.fill_(torch.nan)


def _mend_interpreter() -> None:
    """NumPy 2.4 takes no arrays of one element for numbers, which Triton 3.6's interpreter makes of loop bounds."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


if DEVICE.type == "cpu":
    _mend_interpreter()
