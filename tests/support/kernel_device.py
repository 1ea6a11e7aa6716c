"""The device on which tests run Triton kernels: the GPU if there is one, else the CPU with Triton's interpreter."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import pytest
import torch
from pairwise import cover_pairs_and_mark

pytest.importorskip("triton", reason="builds of torch for CPUs may come without Triton")

DEVICE: Final = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE: Final = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""Relative errors, in the norm, that rounding explains."""
HALF: Final = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
"""A two-byte type that ``tl.dot`` multiplies: the interpreter multiplies bfloat16 as if its bits were integers."""


def error(value: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the distance of ``value`` from ``expected`` relative to its norm; NaN where either contains NaN."""
    wide, wanted = value.double().cpu(), expected.double().cpu()
    return float((wide - wanted).norm() / wanted.norm())


def combine(*axes: Sequence[Any]) -> list[Any]:
    """Return all combinations of a test's parameters on a GPU; for the interpreter, which is slow, a few with all pairs.

    ``make test`` runs enough of these few to cover every value, and ``make matrix`` runs the rest.
    """
    return list(itertools.product(*axes)) if DEVICE.type == "cuda" else cover_pairs_and_mark(*axes)


def noise(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return normal random numbers on the device, the same for each seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill with NaN, or with the least integer, so that an element that is not written shows."""
    return tensor.fill_(torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min)


def poison_allocations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``torch.empty`` return poisoned tensors from now on, for outputs and for intermediate results."""
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, _poisoned(getattr(torch, name)))


def _poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *shape, **options: poison(make(*shape, **options))


def _mend_interpreter() -> None:
    """Repair Triton 3.6's interpreter where it differs from a GPU or fails.

    It takes loop bounds from arrays, which NumPy 2.4 does not convert to integers. Its conversion to FP8 rounds
    midpoints up, loses the carry and does not saturate; a GPU rounds to the nearest, midpoints to even, and saturates
    at 448.
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
    from fast_interpreter import speed_up_interpreter

    _mend_interpreter()
    speed_up_interpreter()
    # The tests' tensors are small: other threads would only wait for work, which takes CPU time.
    torch.set_num_threads(1)
