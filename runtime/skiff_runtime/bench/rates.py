"""What this machine's device can do: the two rates by which a roofline is drawn, measured in a process of its own.

``python -m skiff_runtime.bench.rates cuda bfloat16`` prints them as JSON. The device is free again when it ends.
"""

import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Final

import msgspec
import torch

from skiff_runtime.bench.roofline import Rates
from skiff_runtime.engine.cpu import avoid_trapping_amx
from skiff_runtime.errors import SkiffError

LIMIT_SECONDS: Final = 180.0
REPEATS: Final = 10
COPIED_BYTES: Final = {"cuda": 4 << 30, "cpu": 256 << 20}
SIDE: Final = {"cuda": 8192, "cpu": 1024}


def measure(device: str, kind: str, threads: int | None) -> Rates:
    """Rates of ``device`` in the type ``kind`` (``fp8`` or torch's name), seen by a child process."""
    command = [sys.executable, "-m", "skiff_runtime.bench.rates", device, kind, str(threads or 0)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=LIMIT_SECONDS, check=True)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        told = (error.stderr or b"").decode(errors="replace").strip().splitlines()[-1:]
        raise SkiffError(f"the rates of {device} could not be measured: {''.join(told) or error}") from None
    return msgspec.json.decode(done.stdout, type=Rates)


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
        product: Callable[[], object] = lambda: torch._scaled_mm(  # noqa: E731
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
