"""Where tests of Triton kernels run: on the GPU there is, else in Triton's interpreter on the CPU."""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
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
    """NaN in every place, or the least of whole numbers, so that what is not written shows."""
    return tensor.fill_(torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min)


def poison_allocations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ``torch.empty`` gives from now on is poisoned: a kernel's output, and what it leaves to the next one."""
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, _poisoned(getattr(torch, name)))


def _poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *shape, **options: poison(make(*shape, **options))


def _mend_interpreter() -> None:
    """Triton 3.6's interpreter takes loop bounds from arrays, which NumPy 2.4 does not take for numbers.

    In its conversions to e4m3 halves go up, what they carry is lost, and nothing saturates; on a GPU numbers become the
    nearest, of two the even one, and at most 448.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch, convert = interpreter._patch_lang_tensor, interpreter._convert_float

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def converted(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if target != tl.float8e4nv:
            return convert(data, source, target, rounding)
        wide = convert(data, source, tl.float32, None).view(np.float32) if source == tl.bfloat16 else data
        bounded = torch.from_numpy(np.array(wide, dtype=np.float32)).clamp_(-448, 448)
        return bounded.to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    interpreter._patch_lang_tensor, interpreter._convert_float = patched, converted


if DEVICE.type == "cpu":
    _mend_interpreter()
