"""LoRA adapters of an engine: their copies in host memory, from which the plans of steps fill the LoRA slots."""

from collections.abc import Sequence
from pathlib import Path
from threading import Lock

import torch

from skiff_runtime.kernels.lora_slots import HostBuffer, count_buffer_bytes, fill_slot
from skiff_runtime.layers.lora import LoraLayer
from skiff_runtime.models.lora_adapter import read_adapter
from skiff_runtime.step import LoraLoad

AdapterCopy = Sequence[HostBuffer]
"""An adapter as its file has it, and what makes a slot of this rank hold it."""


class LoraAdapters:
    """Host copies by adapter id. The scheduler bounds their number (``--max-cpu-loras``)."""

    def __init__(
        self, layers: Sequence[tuple[str, LoraLayer]], *, max_rank: int, base_names: frozenset[str]
    ) -> None:
        self._layers = list(layers)
        self._max_rank = max_rank
        self._base_names = base_names
        self._copies: dict[int, AdapterCopy] = {}
        self._lock = Lock()
        weights = self._layers[0][1].weights
        self._dtype = weights.a.dtype
        largest = max(
            max(module.inputs, module.outputs) for _, layer in self._layers for module in layer.modules
        )
        is_cuda = weights.a.device.type == "cuda"
        staged = count_buffer_bytes(largest * max_rank * torch.float32.itemsize) if is_cuda else 0
        self._staging = torch.empty(staged, dtype=torch.uint8, device=weights.a.device)

    def register(self, adapter_id: int, path: Path) -> None:
        """Read and check an adapter, on any thread, while steps run. Raises ``ModelError`` if it cannot be served."""
        copy = read_adapter(path, self._layers, max_rank=self._max_rank, base_names=self._base_names)
        with self._lock:
            self._copies[adapter_id] = copy

    def unregister(self, adapter_id: int) -> None:
        """Forget an adapter; steps that were launched keep its copy until they have run."""
        with self._lock:
            del self._copies[adapter_id]

    def find(self, loads: Sequence[LoraLoad]) -> list[tuple[int, AdapterCopy]]:
        """Return the LoRA slots to fill, and the copies to fill them with."""
        with self._lock:
            return [(load.lora_slot, self._copies[load.adapter_id]) for load in loads]

    @torch.inference_mode()
    def load(self, copies: Sequence[tuple[int, AdapterCopy]]) -> None:
        """Fill LoRA slots, on the current stream, behind the steps that read what they hold now."""
        for slot, copy in copies:
            for buffer in copy:
                fill_slot(slot, buffer, self._staging, self._dtype)
