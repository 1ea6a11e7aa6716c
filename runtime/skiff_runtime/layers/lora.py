"""LoRA of linear layers (Hu et al., 2021): the low-rank matrices of the adapters in LoRA slots, sharded as the layers are.

A column-parallel layer holds its outputs of B and the whole of A. A row-parallel one holds its inputs of A and the whole of
B, and adds B (A x) of its inputs to its part of the sum, so the layer's all-reduce completes both. A step without adapters
has no mapping, and its layers launch the same kernels as without LoRA.

Two code paths compute the sum. ``add`` launches a kernel behind the base product. Or A of all slots lies behind the rows of
the base matrix ("appended"), so that A x is part of the base product, and ``defer`` leaves B (A x) to the kernel that reads
the output next. That is faster for few slots and up to a few hundred tokens, which is what decode steps have.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from skiff_runtime.kernels.lora import LoraExpand, LoraMapping, LoraWeights, LoraWorkspace, add_lora
from skiff_runtime.kernels.lora_slots import SlotMatrix
from skiff_runtime.kernels.tuning import tuning_for

APPENDED_ROWS_MULTIPLE: Final = 64
"""Appended rows are padded to it, so that the rows of the product begin at whole cache lines as they do without them."""


class LoraState:
    """LoRA on one rank: the sizes of the slots, and the mapping of the step that is computed; None without adapters."""

    def __init__(self, device: torch.device, *, max_loras: int, max_rank: int, max_tokens: int) -> None:
        """Allocate for steps of up to ``max_tokens`` tokens. Raises ``ValueError`` for a rank that kernels do not support."""
        self.max_loras = max_loras
        self.max_rank = max_rank
        self._max_tokens = max_tokens
        self.tuning = tuning_for(device).lora
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

    def count_appended_rows(self, parts: int) -> int:
        """Return the rows for A of all slots of a layer of ``parts`` modules behind its base matrix; 0 if they are too many."""
        rows, limits = self.max_loras * self.max_rank, self.tuning.appended
        if rows > limits.max_rows or self.max_rank > limits.max_rank:
            return 0
        return -(-rows * parts // APPENDED_ROWS_MULTIPLE) * APPENDED_ROWS_MULTIPLE

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


@dataclass(frozen=True, slots=True)
class DeferredExpand:
    """A layer's output out [T, outputs] of x [T, inputs], to which the kernel that reads it next adds ``expand``."""

    out: torch.Tensor
    expand: LoraExpand
    x: torch.Tensor

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.out)

    def reduce(self) -> torch.Tensor:
        """Return the complete output, as ``PartialSum.reduce`` does, by a launch of its own."""
        add_lora(self.out, self.x, self.expand.weights, self.expand.mapping)
        return self.out


LinearOutput = torch.Tensor | DeferredExpand
"""The output of a linear layer, complete or not."""


def split_deferred(output: LinearOutput) -> tuple[torch.Tensor, LoraExpand | None]:
    """Return the output, and what is still to be added to it."""
    return (output.out, output.expand) if isinstance(output, DeferredExpand) else (output, None)


class LoraLayer:
    """The matrices of all LoRA slots for one linear layer on one rank; see ``LoraWeights`` for their layout.

    ``appended``: zeros behind the rows of the base matrix, for A; ``LoraState.count_appended_rows`` of them.
    """

    def __init__(
        self,
        modules: Sequence[LoraModule],
        state: LoraState,
        dtype: torch.dtype,
        device: torch.device,
        appended: torch.Tensor | None = None,
    ) -> None:
        self.modules = tuple(modules)
        self._state = state
        self._is_appended = appended is not None
        sizes = tuple(_length(each.local_outputs) for each in modules)
        inputs = _length(modules[0].local_inputs)
        count, rank = state.max_loras, state.max_rank
        rows = count * len(modules) * rank
        if appended is None:
            appended = torch.zeros((rows, inputs), dtype=dtype, device=device)
        self.weights = LoraWeights(
            a=appended[:rows].view(count, len(modules), rank, inputs),
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

    @property
    def is_active(self) -> bool:
        """Return whether a token of the present step has an adapter, as far as the host knows."""
        return self._state.is_active

    def add(self, out: torch.Tensor, x: torch.Tensor, *, x_is_complete: bool) -> None:
        """Add the adapters' products of x [T, inputs] to out [T, outputs], in place; see ``kernels.lora.add_lora``."""
        assert self._state.mapping is not None
        add_lora(out, x, self.weights, self._state.mapping, x_is_complete=x_is_complete)

    def should_defer(self, tokens: int) -> bool:
        """Return whether a step of ``tokens`` tokens should multiply by the appended rows, for ``defer``.

        For one token the norm, which follows the layers of one module, would read the whole B by a single program.
        """
        is_small = tokens * self._state.max_rank <= self._state.tuning.appended.max_elements
        return self._is_appended and is_small and (tokens > 1 or len(self.modules) > 1)

    def should_read_early(self, tokens: int) -> bool:
        """Return whether ``add`` should read x while the base product of ``tokens`` tokens runs."""
        return tokens > 1 or sum(self.weights.part_sizes) <= self._state.tuning.early_outputs

    def defer(self, product: torch.Tensor, x: torch.Tensor) -> DeferredExpand:
        """Return the output of x [T, inputs], whose ``product`` [T, outputs + appended rows] is that with all rows."""
        assert self._state.mapping is not None
        outputs, inner = sum(self.weights.part_sizes), self.weights.a.shape[:3].numel()
        expand = LoraExpand(product[:, outputs : outputs + inner], self.weights, self._state.mapping)
        return DeferredExpand(product[:, :outputs], expand, x)


def _length(shard: slice) -> int:
    return int(shard.stop - shard.start)
