"""Penalties on tokens that a text already has, on any device."""

from typing import Final

import torch

LARGEST_LOGIT: Final = 1e29
"""What penalties may make of a logit at most, so that no later arithmetic overflows."""
SLICE_ELEMENTS: Final = 1 << 22
"""Most logits, or tokens, that a CPU penalizes at a time, which bounds the memory it takes."""


def apply_penalties(
    logits: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    ends: torch.Tensor,
    tokens: torch.Tensor,
    prompts: torch.Tensor,
    penalties: torch.Tensor,
    *,
    longest: int,
) -> None:
    """Penalize ``rows`` int64[P] of logits float32 [S, V] in place, each by the text in a slot of its own, ``slots`` int[P].

    The first ``ends`` int[P] of a slot's ``tokens`` int32[slots, n] are the text, ``longest`` the most of them; the first
    of its ``prompts`` int64[slots] are the prompt. ``penalties`` float32 [slots, 3]
    are repetition, presence and frequency. Repetition (Keskar et al., 2019) divides positive logits of tokens that
    the text has anywhere and multiplies negative ones; the other two are OpenAI's, and count the output alone.
    """
    if logits.device.type == "cuda":
        from skiff_runtime.kernels.triton.sampling import penalties as fused

        fused.apply_penalties(logits, rows, slots, ends, tokens, prompts, penalties)
        return
    step = max(1, SLICE_ELEMENTS // max(longest, logits.shape[1]))
    for part in torch.split(torch.arange(len(rows)), step):
        slot = slots[part]
        _penalize(logits, rows[part], tokens[slot, :longest], prompts[slot], ends[part], penalties[slot])


def _penalize(
    logits: torch.Tensor,
    rows: torch.Tensor,
    history: torch.Tensor,
    prompts: torch.Tensor,
    ends: torch.Tensor,
    penalties: torch.Tensor,
) -> None:
    """The same by texts int[P, L]; what stands behind them is passed over, but must be ids of tokens."""
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
