"""Kernels that Triton compiles, in the log: ahead of a start they are its progress, in a start they are what was not prebuilt."""

from typing import Any

from triton import knobs

from skiff_runtime import log
from skiff_runtime.kernels.fused.keys import settle_keys


def prepare_compilations() -> None:
    """Before the first launch, where kernels are compiled ahead as where they are sought: settle their keys, log each compiled."""
    settle_keys()
    knobs.compilation.listener = _log


def _log(*, metadata: dict[str, Any], times: Any, cache_hit: bool, **_: Any) -> None:
    if not cache_hit:
        log.event("kernel_compiled", kernel=metadata["name"], seconds=times.total / 1e6)
