"""Penalties on tokens that a text already has, on any device."""

from typing import Final

import torch

LARGEST_LOGIT: Final = 1e29
"""What penalties may make of a logit at most, so that no later arithmetic overflows."""


def penalize(
    logits: torch.Tensor,
    rows: torch.Tensor,
    history: torch.Tensor,
    prompts: torch.Tensor,
    ends: torch.Tensor,
    penalties: torch.Tensor,
) -> None:
    """Penalize ``rows`` int64[P] of logits float32 [S, V] in place, each by a text of its own.

    The first ``ends`` int64[P] tokens of ``history`` int[P, L] are the texts, the first ``prompts`` int64[P] of
    these their prompts; what stands behind is passed over, but must be ids of tokens. ``penalties`` float32 [P, 3]
    are repetition, presence and frequency. Repetition (Keskar et al., 2019) divides positive logits of tokens that
    the text has anywhere and multiplies negative ones; the other two are OpenAI's, and count the output alone.
    """
    repetition, presence, frequency = penalties.unsqueeze(1).unbind(2)
    tokens = history.long()
    places = torch.arange(history.shape[1], device=logits.device)
    known = places < ends[:, None]
    seen = _counts(tokens, known, logits.shape[1]) > 0
    output = _counts(tokens, known & (places >= prompts[:, None]), logits.shape[1])
    # Only tokens of the history can change. One that stands there twice gets the same new logit twice.
    cells = rows[:, None], tokens
    values = logits[cells]
    repeated = torch.where(values > 0, values / repetition, values * repetition)
    penalized = torch.where(seen, repeated, values) - frequency * output - presence * (output > 0)
    logits[cells] = penalized.clamp_(-LARGEST_LOGIT, LARGEST_LOGIT)


def _counts(tokens: torch.Tensor, counted: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """For each token, how often it is among those ``counted`` in its row: exact float32 [P, L]."""
    counts = torch.zeros((tokens.shape[0], vocab_size), device=tokens.device)
    return counts.scatter_add_(1, tokens, counted.float()).gather(1, tokens)
