"""LoRA of linear layers (Hu et al., 2021): the low-rank matrices of the adapters in LoRA slots, sharded as the layers are.

A column-parallel layer holds its outputs of B and the whole of A. A row-parallel one holds its inputs of A and the whole of
B, and adds B (A x) of its inputs to its part of the sum, so the layer's all-reduce completes both. A step without adapters
has no mapping, and its layers launch the same kernels as without LoRA.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from skiff_runtime.kernels.fp8 import Activations
from skiff_runtime.kernels.lora import LoraMapping, LoraWeights, LoraWorkspace, add_lora
from skiff_runtime.kernels.lora_slots import SlotMatrix


class LoraState:
    """LoRA on one rank: the sizes of the slots, and the mapping of the step that is computed; None without adapters."""

    def __init__(self, device: torch.device, *, max_loras: int, max_rank: int, max_tokens: int) -> None:
        """Allocate for steps of up to ``max_tokens`` tokens. Raises ``ValueError`` for a rank that kernels do not support."""
        self.max_loras = max_loras
        self.max_rank = max_rank
        self._max_tokens = max_tokens
        self.workspace = LoraWorkspace(device, max_tokens=max_tokens, max_loras=max_loras, max_rank=max_rank)
        self.mapping: LoraMapping | None = None

    def on_meta_device(self) -> "LoraState":
        """Return the same sizes without memory, for a model on the meta device."""
        return LoraState(
            torch.device("meta"),
            max_loras=self.max_loras,
            max_rank=self.max_rank,
            max_tokens=self._max_tokens,
        )

    @property
    def is_active(self) -> bool:
        """Return whether a token of the present step has an adapter, as far as the host knows."""
        return self.mapping is not None

    def prepare(self, slots: torch.Tensor | None) -> None:
        """Set the LoRA slots of the tokens that are computed next: int32 [T], or None if no token has one."""
        self.mapping = None if slots is None else self.workspace.map_tokens(slots)


@dataclass(frozen=True, slots=True)
class LoraModule:
    """A module of the checkpoint with [outputs, inputs], and the rank's outputs and inputs of it."""

    name: str
    outputs: int
    inputs: int
    local_outputs: slice
    local_inputs: slice


class LoraLayer:
    """The matrices of all LoRA slots for one linear layer on one rank; see ``LoraWeights`` for their layout."""

    def __init__(
        self, modules: Sequence[LoraModule], state: LoraState, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.modules = tuple(modules)
        self._state = state
        sizes = tuple(_length(each.local_outputs) for each in modules)
        inputs = _length(modules[0].local_inputs)
        count, rank = state.max_loras, state.max_rank
        self.weights = LoraWeights(
            a=torch.zeros((count, len(modules), rank, inputs), dtype=dtype, device=device),
            b=torch.zeros((count, sum(sizes), rank), dtype=dtype, device=device),
            ranks=torch.zeros(count, dtype=torch.int32, device=device),
            part_sizes=sizes,
            call_id=state.workspace.new_call_id(),
        )
        self.a, self.b = self._locate_matrices()
        """The A and the B of each module in the slots' memory."""
        self.ranks = self.weights.ranks.view(count, 1, 1)
        """The ranks of all slots, shaped as a matrix of one element in each."""

    def _locate_matrices(self) -> tuple[list[SlotMatrix], list[SlotMatrix]]:
        a, b, first = [], [], 0
        for part, (module, size) in enumerate(zip(self.modules, self.weights.part_sizes, strict=True)):
            a.append(SlotMatrix(self.weights.a[:, part], first_column=module.local_inputs.start))
            b.append(
                SlotMatrix(self.weights.b[:, first : first + size], first_row=module.local_outputs.start)
            )
            first += size
        return a, b

    @property
    def nbytes(self) -> int:
        """Bytes of the matrices of all slots."""
        return self.weights.a.nbytes + self.weights.b.nbytes

    def add(self, out: torch.Tensor, x: Activations) -> None:
        """Add the adapters' products of x [T, inputs] to out [T, outputs], in place; no-op in a step without adapters."""
        if self._state.mapping is not None:
            assert isinstance(x, torch.Tensor), "norms quantize nothing in such steps"
            add_lora(out, x, self.weights, self._state.mapping)


def _length(shard: slice) -> int:
    return int(shard.stop - shard.start)
