"""Triton's interfaces beyond its language, for ahead-of-time compilation and the log of compilations.

No other module imports from ``triton.backends``, ``triton.runtime`` or ``triton.knobs``. torch decides Triton's
version.
"""

from typing import Final

from skiff_runtime.internals import Shape, borrowed

__all__ = ["DriverBase", "GPUTarget", "JITFunction", "build", "drivers", "knobs", "nvidia_driver"]

NEEDED: Final[Shape] = {
    "triton:JITFunction": ("arg_names", "cache_key"),
    "triton.knobs:compilation": ("listener",),
    "triton.runtime:driver": ("active", "set_active"),
    "triton.runtime.build:_build": (
        "name",
        "src",
        "srcdir",
        "library_dirs",
        "include_dirs",
        "libraries",
        "ccflags",
    ),
    "triton.runtime.build:_load_module_from_path": ("name", "path"),
    "triton.backends.compiler:GPUTarget": ("backend", "arch", "warp_size"),
    "triton.backends.driver:DriverBase": ("get_current_target", "get_active_torch_device", "is_active"),
    "triton.backends.nvidia.driver:CudaUtils": (),
    "triton.backends.nvidia.driver:CudaLauncher": ("src", "metadata"),
    "triton.backends.nvidia.driver:dirname": (),
    "triton.backends.nvidia.driver:library_dirs": (),
}

with borrowed("triton", NEEDED, bounded_by="torch"):
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase
    from triton.backends.nvidia import driver as nvidia_driver
    from triton.runtime import build
    from triton.runtime import driver as drivers
    from triton.runtime.jit import JITFunction
