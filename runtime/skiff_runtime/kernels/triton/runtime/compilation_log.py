"""Log events for kernels that Triton compiles: the progress of ``skiff prebuild``, or what it missed."""

from typing import Any

from skiff_runtime import log
from skiff_runtime.kernels.triton_internals import knobs


def log_compilations() -> None:
    """Log each kernel that is compiled from now on because no cache contains it."""
    knobs.compilation.listener = _log


def _log(*, metadata: dict[str, Any], times: Any, cache_hit: bool, **_: Any) -> None:
    if not cache_hit:
        log.event("kernel_compiled", kernel=metadata["name"], seconds=times.total / 1e6)
