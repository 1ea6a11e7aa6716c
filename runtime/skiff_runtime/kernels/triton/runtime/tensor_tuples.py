"""Tuples of tensors in kernels, whose number is a constexpr, such as one for each row of a program."""

import triton
import triton.language as tl


@triton.jit
def no_tensors() -> tl.tuple:
    """Return an empty tuple, to which tensors are added."""
    return ()
