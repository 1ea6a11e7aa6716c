"""The forward pass of a step on one rank: a model over its attention backend, and what comes out of the last layer."""

from dataclasses import dataclass

import torch

from skiff_runtime.attention.base import AttentionBackend, AttentionBatch
from skiff_runtime.kernels.step_inputs import StepInputs
from skiff_runtime.models.decoder import DecoderModel


@dataclass(frozen=True, slots=True)
class Wanted:
    """Output and residual [S, hidden] of the last layer, of S tokens of a step whose logits are wanted."""

    output: torch.Tensor
    residual: torch.Tensor


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """Output and residual [T, hidden] of the last layer, of every token of a step."""

    output: torch.Tensor
    residual: torch.Tensor

    def at(self, places: torch.Tensor | slice) -> Wanted:
        """Those of S of the T tokens."""
        return Wanted(self.output[places], self.residual[places])


class ForwardPass:
    """Computes steps with ``model``, whose K and V are where ``backend`` reads them, on ``device``."""

    def __init__(self, model: DecoderModel, backend: AttentionBackend, device: torch.device) -> None:
        self._model = model
        self.backend = backend
        self.device = device

    @torch.inference_mode()
    def forward(self, inputs: StepInputs, attention: AttentionBatch) -> HiddenStates:
        """Compute a step of T tokens: fill its K and V, and return what the last layer made of it."""
        self.backend.prepare(attention)
        return self.compute(inputs, self.backend)

    @torch.inference_mode()
    def forward_selected(self, inputs: StepInputs, attention: AttentionBatch, places: torch.Tensor) -> Wanted:
        """As ``forward``, for who wants the tokens at ``places`` int[S] alone: the last layer leaves the others out."""
        self.backend.prepare(attention)
        return Wanted(
            *self._model.forward(
                inputs.token_ids, inputs.positions, inputs.slot_mapping, self.backend, wanted=places
            )
        )

    @torch.inference_mode()
    def compute(self, inputs: StepInputs, backend: AttentionBackend) -> HiddenStates:
        """As ``forward``, by a backend that is prepared."""
        return HiddenStates(
            *self._model.forward(inputs.token_ids, inputs.positions, inputs.slot_mapping, backend)
        )

    def empty_logits(self, rows: int) -> torch.Tensor:
        """Where ``logits`` of so many tokens can be put."""
        return self._model.empty_logits(rows)

    @torch.inference_mode()
    def logits(self, wanted: Wanted, room: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [S, vocab] of S of a step's tokens, in the model's type (on a CPU, float32); in ``room`` if given."""
        return self._model.logits(wanted.output, wanted.residual, room)
