"""Which of NVIDIA's libraries multiplies matrices in short types: cuBLAS, or cuBLASLt, which is ahead with fewer rows."""

from typing import Final

import torch

MAX_ROWS: Final = 128
"""Of the cases in which cuBLASLt was faster on an H200."""
TYPES: Final = (torch.bfloat16, torch.float16)


def prefer(x: torch.Tensor) -> None:
    """Let torch's next product of ``x`` [T, inputs] be the faster library's."""
    fewer = x.shape[0] <= MAX_ROWS and x.dtype in TYPES
    torch.backends.cuda.preferred_blas_library("cublaslt" if fewer else "cublas")
