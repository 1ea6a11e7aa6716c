"""What bias, penalties and a least length make of logits: the definition, one token after another."""

from collections.abc import Iterable

import torch

from skiff_runtime.messages import SamplingSpec


def edited_row(
    logits: torch.Tensor,
    prompt: list[int],
    output: list[int],
    sampling: SamplingSpec,
    *,
    ends: Iterable[int],
    banned: float,
) -> torch.Tensor:
    """One row [vocab], in float64; what would end an answer that is too short is ``banned``."""
    row = logits.double().tolist()
    for token, bias in sampling.logit_bias:
        row[token] += bias
    for token in {*prompt, *output}:
        penalty = sampling.repetition_penalty
        row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
    for token in set(output):
        row[token] -= sampling.frequency_penalty * output.count(token) + sampling.presence_penalty
    if len(output) < sampling.min_tokens:
        for token in (*ends, *sampling.stop_token_ids):
            row[token] = banned
    return torch.tensor(row, dtype=torch.float64)
