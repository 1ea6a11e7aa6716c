"""Penalties on tokens that a text already has, on any device."""

from typing import Final

import torch

LARGEST_LOGIT: Final = 1e29
"""What penalties may make of a logit at most, so that no later arithmetic overflows."""


def penalize(
    logits: torch.Tensor,
    history: torch.Tensor,
    prompts: torch.Tensor,
    ends: torch.Tensor,
    penalties: torch.Tensor,
) -> torch.Tensor:
    """New logits [P, V] of P texts, from logits float32 [P, V].

    The first ``ends`` int64[P] tokens of ``history`` int[P, L] are the texts, the first ``prompts`` int64[P] of
    these their prompts; what stands behind is passed over, but must be ids of tokens. ``penalties`` float32 [P, 3]
    are repetition, presence and frequency. Repetition (Keskar et al., 2019) divides positive logits of tokens that
    the text has anywhere and multiplies negative ones; the other two are OpenAI's, and count the output alone.
    """
    repetition, presence, frequency = penalties.unsqueeze(1).unbind(2)
    places = torch.arange(history.shape[1], device=logits.device)
    known = places < ends[:, None]
    tokens = history.long()
    seen = _counts(logits, tokens, known) > 0
    output = _counts(logits, tokens, known & (places >= prompts[:, None]))
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    scaled = torch.where(seen, repeated, logits)
    scaled -= frequency * output + presence * (output > 0)
    return scaled.clamp_(-LARGEST_LOGIT, LARGEST_LOGIT)


def _counts(logits: torch.Tensor, tokens: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """How often each token is among those ``counted``, as exact float32 [P, V]."""
    return torch.zeros_like(logits).scatter_add_(1, tokens, counted.to(logits.dtype))
