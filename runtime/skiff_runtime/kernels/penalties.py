"""Repetition, presence and frequency penalties on tokens that a text contains already, on any device."""

from typing import Final

import torch

from skiff_runtime.kernels.constants import LARGEST_LOGIT

SLICE_ELEMENTS: Final = 1 << 22
"""The logits, or tokens, that a CPU penalizes at a time, which bounds the memory it takes."""


def apply_penalties(
    logits: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    ends: torch.Tensor,
    tokens: torch.Tensor,
    prompt_lens: torch.Tensor,
    penalties: torch.Tensor,
    *,
    max_len: int,
) -> None:
    """Penalize ``rows`` int64 [P] of logits float32 [S, V] in place, each by the text of its slot, ``slots`` int [P].

    The text is the first ``ends`` int [P] of the slot's ``tokens`` int32 [slots, n], ``max_len`` at most; the first
    of its ``prompt_lens`` int64 [slots] are the prompt. ``penalties`` float32 [slots, 3] are repetition, presence and
    frequency. Repetition (Keskar et al., 2019) divides positive logits of all tokens of the text and multiplies
    negative ones; the other two, OpenAI's, are subtracted for tokens of the output.
    """
    if logits.device.type == "cuda":
        from skiff_runtime.kernels.triton.sampling import penalties as kernel

        kernel.apply_penalties(logits, rows, slots, ends, tokens, prompt_lens, penalties)
        return
    step = max(1, SLICE_ELEMENTS // max(max_len, logits.shape[1]))
    for part in torch.split(torch.arange(len(rows)), step):
        slot = slots[part]
        _penalize_slice(
            logits, rows[part], tokens[slot, :max_len], prompt_lens[slot], ends[part], penalties[slot]
        )


def _penalize_slice(
    logits: torch.Tensor,
    rows: torch.Tensor,
    texts: torch.Tensor,
    prompt_lens: torch.Tensor,
    ends: torch.Tensor,
    penalties: torch.Tensor,
) -> None:
    """Penalize by texts int [P, L]; what stands behind their ends does not count, but must be token ids."""
    repetition, presence, frequency = penalties.unsqueeze(1).unbind(2)
    tokens = texts.long()
    positions = torch.arange(texts.shape[1], device=logits.device)
    in_text = positions < ends[:, None]
    seen = _counts(tokens, in_text, logits.shape[1]) > 0
    output = _counts(tokens, in_text & (positions >= prompt_lens[:, None]), logits.shape[1])
    # Only tokens of the text can change. One that stands there twice is given the same new logit twice.
    cells = rows[:, None], tokens
    values = logits[cells]
    repeated = torch.where(values > 0, values / repetition, values * repetition)
    penalized = torch.where(seen, repeated, values) - frequency * output - presence * (output > 0)
    logits[cells] = penalized.clamp_(-LARGEST_LOGIT, LARGEST_LOGIT)


def _counts(tokens: torch.Tensor, counted: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return, for each token of a row, how often it is among those ``counted`` there: exact float32 [P, L]."""
    counts = torch.zeros((tokens.shape[0], vocab_size), device=tokens.device)
    return counts.scatter_add_(1, tokens, counted.float()).gather(1, tokens)
