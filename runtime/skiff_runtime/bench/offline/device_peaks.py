"""Measurement of a device's peak rates, as a process that prints them, so that the device's memory is free afterwards.

``python -m skiff_runtime.bench.offline.device_peaks DEVICE DTYPE THREADS``; ``THREADS`` 0 keeps torch's number.
"""

import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Final

import msgspec
import torch

from skiff_runtime.bench.offline.roofline import DevicePeaks
from skiff_runtime.engine.cpu import avoid_trapping_amx
from skiff_runtime.kernels.torch_internals import scaled_mm

WARM_UPS: Final = 3
REPEATS: Final = 10
MAX_SECONDS: Final = 3.0
"""Time after which no further repetition begins: a CPU without instructions for a type takes seconds for one product."""
COPY_BYTES: Final = {"cuda": 4 << 30, "cpu": 256 << 20}
MATRIX_SIZE: Final = {"cuda": 8192, "cpu": 1024}


def measure_bandwidth(device: str) -> float:
    """Return the bytes per second that a copy on the device reads and writes."""
    source = torch.ones(COPY_BYTES[device], dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return 2 * source.nbytes / measure_median_seconds(device, lambda: target.copy_(source))


def measure_matmul(device: str, dtype: str) -> float:
    """Return the FLOPs per second of a large square matrix product. ``dtype`` is ``fp8`` or torch's name.

    The matrices are random: the power that a product of zeros saves would allow a higher clock rate.
    """
    size = MATRIX_SIZE[device]
    shape = (size, size)
    if dtype == "fp8" and device == "cuda":
        a, b = (torch.randn(shape, device=device).to(torch.float8_e4m3fn) for _ in range(2))
        ones = torch.ones(size, 1, device=device)
        product: Callable[[], object] = lambda: scaled_mm(  # noqa: E731
            a, b.T, scale_a=ones, scale_b=ones.T, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    else:
        plain = torch.float32 if dtype == "fp8" else getattr(torch, dtype)
        x, y = (torch.randn(shape, device=device).to(plain) for _ in range(2))
        product = lambda: x @ y  # noqa: E731
    return 2.0 * size**3 / measure_median_seconds(device, product)


def measure_median_seconds(device: str, work: Callable[[], object]) -> float:
    """Return the median duration of ``work`` after a few warm-ups; after one if it takes long."""
    times: list[float] = []
    while len(times) < WARM_UPS + REPEATS and (len(times) < 2 or sum(times) < MAX_SECONDS):
        _synchronize(device)
        started = time.perf_counter()
        work()
        _synchronize(device)
        times.append(time.perf_counter() - started)
    return median(times[min(WARM_UPS, len(times) - 1) :])


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main(arguments: list[str]) -> None:
    """Print the peak rates of a device as JSON."""
    device, dtype, threads = arguments
    if int(threads):
        torch.set_num_threads(int(threads))
    if device == "cpu" and dtype != "float32":
        avoid_trapping_amx()
    peaks = DevicePeaks(measure_bandwidth(device), measure_matmul(device, dtype))
    sys.stdout.buffer.write(msgspec.json.encode(peaks) + b"\n")


if __name__ == "__main__":
    main(sys.argv[1:])
