"""How small numbers come to the device: from pinned memory, in one copy, and without anyone waiting for it."""

from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

TURNS: Final = 8
"""Copies that may be under way."""
CAPACITY: Final = 1 << 15
"""Numbers in one of them; rarer, larger ones take memory of their own."""

Columns = NDArray[np.int32]


def upload(values: NDArray[Any], device: torch.device) -> torch.Tensor:
    """A copy on the device. The host does not wait, wherever the device is."""
    host = torch.from_numpy(values)
    if device.type != "cuda":
        return host
    return host.pin_memory().to(device, non_blocking=True)


class StagingBuffers:
    """A ring of pinned buffers and their mirrors on the device; on a CPU, nothing but a name for what is there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._turn = 0
        if device.type == "cuda":
            self._host = torch.empty((TURNS, CAPACITY), dtype=torch.int32, pin_memory=True)
            self._views = self._host.numpy()
            self._mirrors = torch.empty((TURNS, CAPACITY), dtype=torch.int32, device=device)
            self._copied = [torch.cuda.Event() for _ in range(TURNS)]  # type: ignore[no-untyped-call]

    def send(self, columns: Columns, target: torch.Tensor | None = None) -> torch.Tensor:
        """``columns`` on the device, in their shape: until ``TURNS`` later ones, or in ``target`` [columns.size]."""
        if self._device.type != "cuda":
            return torch.from_numpy(columns)
        count = columns.size
        if count > CAPACITY:
            sent = upload(columns, self._device)
            return sent if target is None else target.copy_(sent.flatten()).view(columns.shape)
        self._turn = (self._turn + 1) % TURNS
        copied = self._copied[self._turn]
        copied.synchronize()
        self._views[self._turn, :count] = columns.ravel()
        mirror = self._mirrors[self._turn, :count] if target is None else target
        mirror.copy_(self._host[self._turn, :count], non_blocking=True)
        copied.record()
        return mirror.view(columns.shape)
