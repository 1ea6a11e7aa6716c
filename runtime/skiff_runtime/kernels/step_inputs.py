"""What a model needs to know of a step's tokens, as tensors on its device."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Of T tokens in R rows: ids, positions and places in the KV cache int[T], and the rows' contexts int[R]."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    contexts: torch.Tensor

    def first(self, rows: int) -> "StepInputs":
        """Those of the first rows, where every row has one token."""
        return StepInputs(
            self.token_ids[:rows], self.positions[:rows], self.slot_mapping[:rows], self.contexts[:rows]
        )


def empty_step_inputs(tokens: int, rows: int, device: torch.device) -> StepInputs:
    """Room for a step's inputs."""
    return StepInputs(
        torch.zeros(tokens, dtype=torch.int32, device=device),
        torch.zeros(tokens, dtype=torch.int32, device=device),
        torch.zeros(tokens, dtype=torch.int64, device=device),
        torch.zeros(rows, dtype=torch.int32, device=device),
    )
