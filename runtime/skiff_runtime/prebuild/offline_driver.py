"""Offline Triton driver: compiles kernels for a GPU that is not there, and launches none."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from skiff_runtime.kernels.torch_internals import FakeTensor
from skiff_runtime.kernels.triton.runtime.device_properties import H200_SHARED_MEMORY_BYTES
from skiff_runtime.kernels.triton_internals import DriverBase, GPUTarget, drivers

LaunchSignature = tuple[Any, Any]
"""Source and metadata of a kernel, from which Triton compiles its launcher."""

WARP_SIZE: Final = 32
ADDRESS: Final = 1 << 20
"""Address of every fake storage, aligned as well as a GPU's are: Triton compiles other kernels for other alignments."""
SHARED_BYTES: Final = {80: 163 << 10, 86: 99 << 10, 87: 163 << 10, 89: 99 << 10, 120: 99 << 10, 121: 99 << 10}
"""Shared memory that one program may use, by architecture; all others have as much as an H200."""


@contextmanager
def use_offline_driver(architecture: int) -> Iterator["OfflineDriver"]:
    """Make Triton use an offline driver, and give fake tensors addresses, while the context lasts."""
    fake: Any = FakeTensor
    data_ptr = fake.data_ptr
    fake.data_ptr = lambda self: ADDRESS + int(self.storage_offset()) * self.itemsize
    driver = OfflineDriver(architecture)
    drivers.set_active(driver)
    try:
        yield driver
    finally:
        fake.data_ptr = data_ptr


class OfflineDriver(DriverBase):  # type: ignore[misc]
    """A driver for ``architecture``; ``launched`` lists the kernels that were launched on it."""

    def __init__(self, architecture: int) -> None:
        self.launched: list[LaunchSignature] = []
        self._target = GPUTarget("cuda", architecture, WARP_SIZE)
        self.utils = _DriverUtilities(SHARED_BYTES.get(architecture, H200_SHARED_MEMORY_BYTES))
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


class _DriverUtilities:
    """The functions by which Triton queries a device and loads a module there."""

    launch = None
    """Read for every kernel from Triton 3.7 on."""

    def __init__(self, max_shared_memory_bytes: int) -> None:
        self._shared_bytes = max_shared_memory_bytes

    def get_device_properties(self, _device: int) -> dict[str, int]:
        return {"max_shared_mem": self._shared_bytes}

    def load_binary(
        self, _name: str, _kernel: bytes, _shared: int, _device: int
    ) -> tuple[Any, Any, int, int, int]:
        return object(), 0, 0, 0, 1024
