"""torch's private interfaces: fake tensors, the scaled FP8 product, the profiler's experimental settings.

No other module imports or calls them.
"""

from typing import Any, Final

import torch

from skiff_runtime.internals import Shape, borrowed

__all__ = ["FakeTensor", "FakeTensorMode", "profiler_settings", "scaled_mm"]

NEEDED: Final[Shape] = {
    "torch._subclasses.fake_tensor:FakeTensor": ("data_ptr",),
    "torch._subclasses.fake_tensor:FakeTensorMode": ("__enter__", "__exit__"),
    "torch:_scaled_mm": (),
    "torch._C._profiler:_ExperimentalConfig": (),
}

with borrowed("torch", NEEDED):
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    scaled_mm = torch._scaled_mm
    _ExperimentalConfig: Any = torch._C._profiler._ExperimentalConfig


def profiler_settings(*, all_threads: bool) -> Any:
    """Return profiler settings that record all threads, or only the one that starts the profile.

    torch has this choice from 2.7 on; earlier versions record the one that starts.
    """
    if "profile_all_threads" not in str(_ExperimentalConfig.__init__.__doc__):
        return _ExperimentalConfig()
    return _ExperimentalConfig(profile_all_threads=all_threads)
