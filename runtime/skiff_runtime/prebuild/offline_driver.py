"""A GPU that is elsewhere, to compile Triton's kernels for: its driver launches nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from skiff_runtime.kernels.torch_internals import FakeTensor
from skiff_runtime.kernels.triton.runtime.device_properties import H200_SHARED_BYTES
from skiff_runtime.kernels.triton_internals import DriverBase, GPUTarget, drivers

LaunchSignature = tuple[Any, Any]
"""Source and metadata of a kernel, of which Triton makes what launches it."""

WARP_SIZE: Final = 32
ADDRESS: Final = 1 << 20
"""Where every fake storage begins: as well aligned as a GPU's are."""
SHARED_BYTES: Final = {80: 163 << 10, 86: 99 << 10, 87: 163 << 10, 89: 99 << 10, 120: 99 << 10, 121: 99 << 10}
"""That a program may have, by architecture; all others have as many as an H200."""


@contextmanager
def compiling(architecture: int) -> Iterator["OfflineDriver"]:
    """Triton without a GPU, and fake tensors with addresses."""
    fake: Any = FakeTensor
    address = fake.data_ptr
    fake.data_ptr = lambda self: ADDRESS + int(self.storage_offset()) * self.itemsize
    gpu = OfflineDriver(architecture)
    drivers.set_active(gpu)
    try:
        yield gpu
    finally:
        fake.data_ptr = address


class OfflineDriver(DriverBase):  # type: ignore[misc]
    """Triton's driver of it. ``launched`` are the kernels that it was to launch."""

    def __init__(self, architecture: int) -> None:
        self.launched: list[LaunchSignature] = []
        self._target = GPUTarget("cuda", architecture, WARP_SIZE)
        self.utils = _Utilities(SHARED_BYTES.get(architecture, H200_SHARED_BYTES))
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda device: 0

    @classmethod
    def is_active(cls) -> bool:
        return False

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("nothing runs here")

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        self.launched.append((source, metadata))
        return lambda *_: None


class _Utilities:
    """What Triton asks of a device and of a module loaded there."""

    launch = None
    """Of every kernel, from Triton 3.7 on."""

    def __init__(self, max_shared_memory_bytes: int) -> None:
        self._shared_bytes = max_shared_memory_bytes

    def get_device_properties(self, _device: int) -> dict[str, int]:
        return {"max_shared_mem": self._shared_bytes}

    def load_binary(
        self, _name: str, _kernel: bytes, _shared: int, _device: int
    ) -> tuple[Any, Any, int, int, int]:
        return object(), 0, 0, 0, 1024
