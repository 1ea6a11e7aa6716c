"""Compiles what a function launches, for an architecture whose GPU need not be there; run by ``run_compiling``.

For each line of JSON, the name of a case below, its number and perhaps an architecture, it prints as JSON the PTX and TTGIR
of each kernel that the case launches, by the kernel's name.
"""

import json
import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
import triton

from skiff_runtime.distributed.all_reduce import PeerToPeerAllReduce
from skiff_runtime.kernels.fp8 import add_rms_norm_quantize
from skiff_runtime.kernels.fp8_tensors import empty_fp8_weight
from skiff_runtime.kernels.qk_norm_rope import RopeInputs
from skiff_runtime.kernels.rms_norm import add_rms_norm
from skiff_runtime.kernels.torch_internals import FakeTensorMode
from skiff_runtime.kernels.triton.all_reduce.push_norm import (
    push_all_reduce_add_rms_norm,
    push_all_reduce_add_rms_norm_quantize,
)
from skiff_runtime.kernels.triton.attention.decode_attention import DecodeRows
from skiff_runtime.kernels.triton.attention.fused_decode_attention import FusedDecodeAttention
from skiff_runtime.kernels.triton.fp8.add_rms_norm_gemv import add_rms_norm_fp8_gemv
from skiff_runtime.kernels.tuning import NormGemvTile
from skiff_runtime.prebuild.offline_driver import use_offline_driver

ARCHITECTURE: Final = 90
DEVICE: Final = torch.device("cuda", 0)


def record_kernels(launch: Callable[[], None], architecture: int = ARCHITECTURE) -> dict[str, dict[str, str]]:
    """Return PTX and TTGIR of the kernels that ``launch`` launches."""
    found: dict[str, dict[str, str]] = {}
    run = triton.JITFunction.run

    def record(kernel: Any, *given: Any, **options: Any) -> Any:
        compiled = run(kernel, *given, **options)
        found[kernel.fn.__name__] = {name: compiled.asm[name] for name in ("ptx", "ttgir")}
        return compiled

    triton.JITFunction.run = record
    with use_offline_driver(architecture), FakeTensorMode(), torch.inference_mode():
        launch()
    triton.JITFunction.run = run
    return found


def sum_messages(ranks: int) -> None:
    """Launch the kernels of sums alone."""
    peers = PeerToPeerAllReduce.detached(ranks, DEVICE)
    for size in peers.sample_sizes():
        peers.all_reduce(torch.empty(size // 2, dtype=torch.bfloat16, device=DEVICE))


def normalize(width: int, ranks: int = 2) -> None:
    """Launch the fused kernels, and those that they fuse."""
    peers = PeerToPeerAllReduce.detached(ranks, DEVICE)
    x, residual = (torch.empty((3, width), dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    weight = torch.empty(width, dtype=torch.bfloat16, device=DEVICE)
    assert peers.can_fuse(x)
    peers.add_rms_norm(x, residual, weight, 1e-6)
    peers.add_rms_norm_quantize(x, residual, weight, 1e-6, 3.0)
    push_all_reduce_add_rms_norm(x, residual, weight, 1e-6, peers._memory)
    push_all_reduce_add_rms_norm_quantize(x, residual, weight, 1e-6, peers._memory, 3.0)
    add_rms_norm(x, residual, weight, 1e-6)
    add_rms_norm_quantize(x, residual, weight, 1e-6, 3.0)


def multiply(ranks: int) -> None:
    """Launch a product that is fused with its sum and the norm behind it."""
    peers = PeerToPeerAllReduce.detached(ranks, DEVICE)
    outputs, inputs = 1024, 2048
    x, matrix, residual, weight = (
        torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)
        for shape in ((1, inputs), (outputs, inputs), (1, outputs), (outputs,))
    )
    assert peers.can_fuse_gemv(x, matrix)
    peers.gemv_add_rms_norm(x, matrix, residual, weight, 1e-6, torch.empty_like(matrix))


def attend(kv_heads: int) -> None:
    """Launch decode attention of one row with QK norm and RoPE, in bfloat16."""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=DEVICE)

    qkv, pool = empty(1, kv_heads * 6 * 128), (empty(64, kv_heads, 128), empty(64, kv_heads, 128))
    rope = RopeInputs(empty(64, 2, 128), empty(1, dtype=torch.int32), empty(1, dtype=torch.int64))
    ints = empty(2, 4, dtype=torch.int32)
    launch = FusedDecodeAttention(
        qkv, pool, DecodeRows(ints[0], ints, ints[1], 16), rope, 1e-6, max_seq_len=4096
    )
    launch(qkv, empty(2, 128), pool)


def normalize_and_multiply(rows: int) -> None:
    """Launch an FP8 GEMV of programs of ``rows`` rows that normalizes its token."""
    outputs, inputs = 5120, 2048
    x, norm_weight = (
        torch.empty(shape, dtype=torch.bfloat16, device=DEVICE) for shape in ((1, inputs), (inputs,))
    )
    weight = empty_fp8_weight(outputs, inputs, DEVICE)
    tile = NormGemvTile(rows, 1024)
    add_rms_norm_fp8_gemv(x, x, norm_weight, 1e-6, weight, None, math.inf, tile=tile)


if __name__ == "__main__":
    cases: dict[str, Callable[[int], None]] = {
        "sum": sum_messages,
        "normalize": normalize,
        "multiply": multiply,
        "attend": attend,
        "normalize_and_multiply": normalize_and_multiply,
    }
    for line in sys.stdin:
        kind, number, *architecture = json.loads(line)
        print(json.dumps(record_kernels(partial(cases[kind], number), *architecture)), flush=True)
