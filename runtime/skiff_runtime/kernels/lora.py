"""LoRA: the low-rank products of many adapters that are added to a linear layer's outputs, on any device.

The tokens of a step belong to adapters in LoRA slots, or to none. A token's output gains B (A x) of its slot, with A
[rank, inputs], B [outputs, rank] and the adapter's scale folded into B. On a GPU nothing here waits for the device, and
buffers have sizes that follow from the shapes of the arguments alone, so steps may be captured in CUDA graphs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F

from skiff_runtime.step import NO_LORA_SLOT

MAX_CALL_IDS: Final = 1024
"""The maximum number of ``LoraWeights`` of one rank: four for each decoder layer, for models of up to 256 layers."""
CALL_ID_STRIDE: Final = 4
"""Numbers from one call id to the next, so that each begins at a multiple of 16 bytes."""


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """The matrices of all LoRA slots for one linear layer, whose outputs are those of 1 to 3 packed modules ("parts").

    a                   [max_loras, parts, max_rank, inputs]; products of rows from a slot's rank on are not used
    b                   [max_loras, outputs, max_rank], of the same dtype; columns from a slot's rank on must be finite
    ranks               int32 [max_loras]: the rank of the slot's adapter; 0 where it has nothing for this layer
    part_sizes          the outputs of each part
    call_id             int32 [1], different for all layers of a rank: ``LoraWorkspace.new_call_id``
    """

    a: torch.Tensor
    b: torch.Tensor
    ranks: torch.Tensor
    part_sizes: tuple[int, ...]
    call_id: torch.Tensor


@dataclass(frozen=True, slots=True)
class RowBlocks:
    """The tokens of a step that have a slot, sorted by slot, in blocks of ``rows`` tokens of one slot.

    ``block_tokens`` int32 [max_blocks * rows]: indices of tokens; padding rows of a block have the number of tokens.
    ``block_slots`` int32 [max_blocks]. ``num_blocks`` int32 [1]: the blocks in use; nothing is written beyond them.
    ``memory`` holds them.
    """

    block_tokens: torch.Tensor
    block_slots: torch.Tensor
    num_blocks: torch.Tensor
    rows: int
    memory: "LoraKernelMemory"


@dataclass(frozen=True, slots=True)
class LoraMapping:
    """The LoRA slot of each token of a step, int32 [T] (NO_LORA_SLOT for none), and its row blocks where there are kernels."""

    slots: torch.Tensor
    blocks: RowBlocks | None = None


@dataclass(frozen=True, slots=True)
class LoraExpand:
    """B (A x) of a step's tokens that is still to be added to a layer's output, by the kernel that reads that output next.

    ``inner`` is A x of every slot, [T, max_loras * parts * max_rank], in the order of ``weights.a``; rows may be apart.
    """

    inner: torch.Tensor
    weights: LoraWeights
    mapping: LoraMapping

    def add_to(self, out: torch.Tensor) -> None:
        """Add it to out [T, outputs], in place, by PyTorch alone."""
        count, parts, max_rank = self.weights.a.shape[:3]
        inner = self.inner.view(len(self.inner), count, parts, max_rank)
        for slot, tokens in _group_by_slot(self.mapping):
            rank, first = int(self.weights.ranks[slot]), 0
            for part, size in enumerate(self.weights.part_sizes):
                _add_expanded(out, inner[tokens, slot, part, :rank], self.weights, slot, tokens, first, size)
                first += size


@dataclass(frozen=True, slots=True)
class LoraKernelMemory:
    """Buffers of the kernels, for the largest step: its row blocks, the epoch int32 [1], and LL words int64 (``add_lora_kernel``)."""

    num_blocks: torch.Tensor
    block_slots: torch.Tensor
    block_tokens: torch.Tensor
    epoch: torch.Tensor
    words: torch.Tensor


class LoraWorkspace:
    """Memory that the LoRA launches of one rank share: call ids, and for kernels the grouped tokens of a step.

    Its addresses never change, so graphs that were captured apart may use one mapping. All launches that use it must be
    on one stream.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        max_tokens: int,
        max_loras: int,
        max_rank: int,
        has_kernels: bool | None = None,
    ) -> None:
        """Allocate for steps of up to ``max_tokens`` tokens, and layers of up to three parts.

        ``has_kernels``: also for Triton's kernels; by default on a GPU.
        """
        self.max_loras = max_loras
        numbers = torch.arange(MAX_CALL_IDS * CALL_ID_STRIDE, dtype=torch.int32, device=device)
        self._call_ids = numbers.div_(CALL_ID_STRIDE, rounding_mode="floor")
        self._num_calls = 0
        self.kernel_memory: LoraKernelMemory | None = None
        if device.type == "cuda" if has_kernels is None else has_kernels:
            from skiff_runtime.kernels.triton.lora.add_lora import count_words
            from skiff_runtime.kernels.triton.lora.group_tokens import count_indices

            slots, tokens = count_indices(max_tokens, max_loras, device)
            num_words = count_words(max_tokens, max_loras, max_rank, device)
            indices = torch.zeros(CALL_ID_STRIDE + slots + tokens, dtype=torch.int32, device=device)
            self.kernel_memory = LoraKernelMemory(
                num_blocks=indices[:1],
                block_slots=indices[CALL_ID_STRIDE : CALL_ID_STRIDE + slots],
                block_tokens=indices[CALL_ID_STRIDE + slots :],
                epoch=torch.zeros(1, dtype=torch.int32, device=device),
                words=torch.zeros(num_words, dtype=torch.int64, device=device),
            )

    def new_call_id(self) -> torch.Tensor:
        """Return the ``call_id`` of another ``LoraWeights``: int32 [1]. Raises ``ValueError`` after MAX_CALL_IDS."""
        if self._num_calls == MAX_CALL_IDS:
            raise ValueError(f"more than {MAX_CALL_IDS} linear layers with LoRA weights")
        first = self._num_calls * CALL_ID_STRIDE
        self._num_calls += 1
        return self._call_ids[first : first + 1]

    def map_tokens(self, slots: torch.Tensor) -> LoraMapping:
        """Group the tokens of a step by ``slots`` int32 [T], which must not change until the step's last kernel has run.

        The mapping is valid until the next call.

        Between two calls ``add_lora`` may be called once with each ``LoraWeights``.
        """
        if self.kernel_memory is None:
            return LoraMapping(slots)
        from skiff_runtime.kernels.triton.lora.group_tokens import group_tokens

        return LoraMapping(slots, group_tokens(slots, self.kernel_memory, self.max_loras))


def add_lora(
    out: torch.Tensor,
    x: torch.Tensor,
    weights: LoraWeights,
    mapping: LoraMapping,
    *,
    x_is_complete: bool = False,
) -> None:
    """Add B (A x) of each token's slot to out [T, outputs], in place; x is [T, inputs], and T that of ``mapping``.

    A x is rounded to the dtype of x. The sum of the base product and B (A x) is computed in float32 and rounded.

    ``x_is_complete``: the kernel that was launched last lets this one start only after x is complete, so that A x may
    be computed while that kernel runs. Kernels of PyTorch and its libraries do, ours only where they say so.
    """
    if out.device.type == "cuda":
        from skiff_runtime.kernels.triton.lora import add_lora as kernel

        kernel.add_lora(out, x, weights, mapping, x_is_complete=x_is_complete)
        return
    for slot, tokens in _group_by_slot(mapping):
        rank = int(weights.ranks[slot])
        chosen, first = x[tokens].float(), 0
        for part, size in enumerate(weights.part_sizes):
            inner = F.linear(chosen, weights.a[slot, part, :rank].float()).to(x.dtype)
            _add_expanded(out, inner, weights, slot, tokens, first, size)
            first += size


def _group_by_slot(mapping: LoraMapping) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield each slot with the indices of its tokens, in ascending order, so that nothing depends on the order of tokens."""
    for slot in sorted(set(mapping.slots.tolist()) - {NO_LORA_SLOT}):
        yield slot, torch.where(mapping.slots == slot)[0]


def _add_expanded(
    out: torch.Tensor,
    inner: torch.Tensor,
    weights: LoraWeights,
    slot: int,
    tokens: torch.Tensor,
    first: int,
    size: int,
) -> None:
    """Multiply inner [tokens, rank] by B of a slot, and add the result to outputs ``first`` to ``first + size``, one part's."""
    rank = inner.shape[1]
    added = F.linear(inner.float(), weights.b[slot, first : first + size, :rank].float())
    out[tokens, first : first + size] = (out[tokens, first : first + size] + added).to(out.dtype)
