"""Measures two rates of a device, for ``bench.rates``, as a process that prints them: the device is free when it ends."""

import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Final

import msgspec
import torch

from skiff_runtime.bench.offline.roofline import Rates
from skiff_runtime.engine.cpu import avoid_trapping_amx
from skiff_runtime.kernels.torch_internals import scaled_mm

REPEATS: Final = 10
COPIED_BYTES: Final = {"cuda": 4 << 30, "cpu": 256 << 20}
SIDE: Final = {"cuda": 8192, "cpu": 1024}


def copied_bytes(device: str) -> float:
    """Bytes read and written in a second by a copy on the device."""
    source = torch.ones(COPIED_BYTES[device], dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return 2 * source.nbytes / _seconds(device, lambda: target.copy_(source))


def matrix_operations(device: str, kind: str) -> float:
    """Floating-point operations in a second of a large square product of random numbers."""
    side = SIDE[device]
    shape = (side, side)
    if kind == "fp8" and device == "cuda":
        a, b = (torch.randn(shape, device=device).to(torch.float8_e4m3fn) for _ in range(2))
        ones = torch.ones(side, 1, device=device)
        product: Callable[[], object] = lambda: scaled_mm(  # noqa: E731
            a, b.T, scale_a=ones, scale_b=ones.T, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    else:
        dtype = torch.float32 if kind == "fp8" else getattr(torch, kind)
        x, y = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
        product = lambda: x @ y  # noqa: E731
    return 2.0 * side**3 / _seconds(device, product)


def _seconds(device: str, work: Callable[[], object]) -> float:
    """Median time of ``work``, after three times unmeasured."""
    times = []
    for _ in range(3 + REPEATS):
        _settle(device)
        started = time.perf_counter()
        work()
        _settle(device)
        times.append(time.perf_counter() - started)
    return median(times[3:])


def _settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main(arguments: list[str]) -> None:
    """Print the rates of a device."""
    device, kind, threads = arguments
    if int(threads):
        torch.set_num_threads(int(threads))
    if device == "cpu" and kind != "float32":
        avoid_trapping_amx()
    rates = Rates(copied_bytes(device), matrix_operations(device, kind))
    sys.stdout.buffer.write(msgspec.json.encode(rates) + b"\n")


if __name__ == "__main__":
    main(sys.argv[1:])
