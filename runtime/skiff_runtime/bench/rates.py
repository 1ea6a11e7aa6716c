"""What this machine's device can do: the two rates by which a roofline is drawn."""

import subprocess
import sys
from typing import Final

import msgspec

from skiff_runtime.bench.offline.roofline import Rates
from skiff_runtime.errors import SkiffError

LIMIT_SECONDS: Final = 180.0


def measure(device: str, kind: str, threads: int | None) -> Rates:
    """Rates of ``device`` in the type ``kind`` (``fp8`` or torch's name), seen by a child process."""
    command = [
        sys.executable,
        "-m",
        "skiff_runtime.bench.offline.device_peaks",
        device,
        kind,
        str(threads or 0),
    ]
    try:
        done = subprocess.run(command, capture_output=True, timeout=LIMIT_SECONDS, check=True)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        told = (error.stderr or b"").decode(errors="replace").strip().splitlines()[-1:]
        raise SkiffError(f"the rates of {device} could not be measured: {''.join(told) or error}") from None
    return msgspec.json.decode(done.stdout, type=Rates)
