"""The inputs of a step's model run, as tensors on its device."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The inputs of T tokens in R rows.

    ``token_ids``, ``positions`` and ``slot_mapping`` (places in the KV pool) are int [T]; ``seq_lens`` int [R] counts
    the tokens of each row, those of this step included.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    seq_lens: torch.Tensor

    def first_rows(self, rows: int) -> "StepInputs":
        """Return the inputs of the first rows, where every row has one token."""
        return StepInputs(
            self.token_ids[:rows], self.positions[:rows], self.slot_mapping[:rows], self.seq_lens[:rows]
        )


def empty_step_inputs(tokens: int, rows: int, device: torch.device) -> StepInputs:
    """Allocate the inputs of a step."""
    return StepInputs(
        torch.zeros(tokens, dtype=torch.int32, device=device),
        torch.zeros(tokens, dtype=torch.int32, device=device),
        torch.zeros(tokens, dtype=torch.int64, device=device),
        torch.zeros(rows, dtype=torch.int32, device=device),
    )
