"""Kernels that Triton compiles, in the log: ahead of a start they are its progress, in a start they are what was not prebuilt."""

from typing import Any

from skiff_runtime import log
from skiff_runtime.kernels.triton_internals import knobs


def log_compilations() -> None:
    """From now on, log each kernel that is compiled because it is in no cache."""
    knobs.compilation.listener = _log


def _log(*, metadata: dict[str, Any], times: Any, cache_hit: bool, **_: Any) -> None:
    if not cache_hit:
        log.event("kernel_compiled", kernel=metadata["name"], seconds=times.total / 1e6)
