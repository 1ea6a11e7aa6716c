"""Staging buffers: small integers reach the device from pinned memory in one copy, and the host waits for none of it."""

from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

COPIES_IN_FLIGHT: Final = 8
"""Copies that may be under way before ``send`` waits for the oldest one."""
CAPACITY: Final = 1 << 15
"""Integers in one buffer; larger copies, which are rare, allocate memory of their own."""

Columns = NDArray[np.int32]


def upload(values: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy to the device; the host never waits for the copy."""
    host = torch.from_numpy(values)
    if device.type != "cuda":
        return host
    return host.pin_memory().to(device, non_blocking=True)


class StagingBuffers:
    """A ring of pinned buffers and their mirrors on the device. On a CPU there is no copy and no buffer."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._turn = 0
        if device.type == "cuda":
            self._host = torch.empty((COPIES_IN_FLIGHT, CAPACITY), dtype=torch.int32, pin_memory=True)
            self._views = self._host.numpy()
            self._mirrors = torch.empty((COPIES_IN_FLIGHT, CAPACITY), dtype=torch.int32, device=device)
            self._copied = [torch.cuda.Event() for _ in range(COPIES_IN_FLIGHT)]  # type: ignore[no-untyped-call]

    def send(self, columns: Columns, target: torch.Tensor | None = None) -> torch.Tensor:
        """Copy ``columns`` to the device, in their shape.

        The result lies in ``target`` [columns.size] if that is given; otherwise it is valid until
        ``COPIES_IN_FLIGHT`` later calls.
        """
        if self._device.type != "cuda":
            return torch.from_numpy(columns)
        count = columns.size
        if count > CAPACITY:
            sent = upload(columns, self._device)
            return sent if target is None else target.copy_(sent.flatten()).view(columns.shape)
        self._turn = (self._turn + 1) % COPIES_IN_FLIGHT
        copied = self._copied[self._turn]
        copied.synchronize()  # the copy that last used this buffer must have read it before it is overwritten
        self._views[self._turn, :count] = columns.ravel()
        mirror = self._mirrors[self._turn, :count] if target is None else target
        mirror.copy_(self._host[self._turn, :count], non_blocking=True)
        copied.record()
        return mirror.view(columns.shape)
