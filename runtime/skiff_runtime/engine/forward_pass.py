"""The forward pass of a step on one rank: a model over its attention backend, and its results before the output head."""

from dataclasses import dataclass

import torch

from skiff_runtime.attention.base import AttentionBackend, AttentionBatch
from skiff_runtime.distributed.vocab_shard import VocabShard
from skiff_runtime.kernels.step_inputs import StepInputs
from skiff_runtime.models.decoder import DecoderModel


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """Output and residual [N, hidden] of the last layer, of all or some of a step's tokens."""

    output: torch.Tensor
    residual: torch.Tensor

    def select(self, indices: torch.Tensor | slice) -> "HiddenStates":
        """Return those of some of the tokens."""
        return HiddenStates(self.output[indices], self.residual[indices])


class ForwardPass:
    """Computes steps with ``model`` on ``device``; ``backend`` attends over the KV cache."""

    def __init__(self, model: DecoderModel, backend: AttentionBackend, device: torch.device) -> None:
        self._model = model
        self.backend = backend
        self.device = device

    def prepare_lora(self, slots: torch.Tensor | None) -> None:
        """Set the LoRA slots int32 [T] of the tokens that are computed next; None if none of them has an adapter."""
        lora = self._model.context.lora
        if lora is not None:
            lora.prepare(slots)

    @torch.inference_mode()
    def forward(
        self, inputs: StepInputs, attention: AttentionBatch, lora_slots: torch.Tensor | None = None
    ) -> HiddenStates:
        """Compute a step of T tokens: store their K and V, and return the hidden states of all of them.

        ``lora_slots`` int32 [T] are the tokens' LoRA slots; None if none of them has an adapter.
        """
        self.prepare_lora(lora_slots)
        self.backend.prepare(attention)
        return self.forward_prepared(inputs, self.backend)

    @torch.inference_mode()
    def forward_selected(
        self, inputs: StepInputs, attention: AttentionBatch, logits_indices: torch.Tensor
    ) -> HiddenStates:
        """Compute a step as ``forward`` does, but return the hidden states of the tokens ``logits_indices`` int[S] alone.

        After its attention, the last layer computes these tokens only. None of the tokens has an adapter.
        """
        self.prepare_lora(None)
        self.backend.prepare(attention)
        return HiddenStates(
            *self._model.forward(
                inputs.token_ids,
                inputs.positions,
                inputs.slot_mapping,
                self.backend,
                logits_indices=logits_indices,
            )
        )

    @torch.inference_mode()
    def forward_prepared(self, inputs: StepInputs, backend: AttentionBackend) -> HiddenStates:
        """Compute a step as ``forward`` does, by a backend, and LoRA, that have been prepared for it."""
        return HiddenStates(
            *self._model.forward(inputs.token_ids, inputs.positions, inputs.slot_mapping, backend)
        )

    def empty_logits(self, rows: int) -> torch.Tensor:
        """Allocate a buffer for the ``logits`` of ``rows`` tokens."""
        return self._model.empty_logits(rows)

    @torch.inference_mode()
    def logits(self, hidden: HiddenStates, out: torch.Tensor | None = None) -> torch.Tensor:
        """Compute this rank's shard of N tokens' logits, [N, vocab_shard.size]; in ``out`` if given.

        They have the model's dtype (on a CPU, float32).
        """
        return self._model.logits(hidden.output, hidden.residual, out)

    @torch.inference_mode()
    def normalize(self, hidden: HiddenStates) -> torch.Tensor:
        """Return the hidden states of N tokens behind the final norm, [N, hidden]."""
        return self._model.normalize(hidden.output, hidden.residual)

    @property
    def vocab_shard(self) -> VocabShard:
        """The tokens of which this rank computes logits."""
        return self._model.vocab_shard

    def whole_logits(self, hidden: HiddenStates) -> torch.Tensor:
        """Compute the logits [N, vocab] of N tokens, gathered on every rank."""
        return self.vocab_shard.gather(self.logits(hidden))
