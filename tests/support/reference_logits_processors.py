"""Reference for logits processors: bias, penalties and ``min_tokens``, one token after another in float64."""

from collections.abc import Iterable

import torch

from skiff_runtime.messages import SamplingSpec


def process_row(
    logits: torch.Tensor,
    prompt: list[int],
    output: list[int],
    sampling: SamplingSpec,
    *,
    end_tokens: Iterable[int],
    masked: float,
) -> torch.Tensor:
    """Return one row [vocab] in float64; below ``min_tokens``, tokens that end an answer get the logit ``masked``."""
    row = logits.double().tolist()
    for token, bias in sampling.logit_bias:
        row[token] += bias
    for token in {*prompt, *output}:
        penalty = sampling.repetition_penalty
        row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
    for token in set(output):
        row[token] -= sampling.frequency_penalty * output.count(token) + sampling.presence_penalty
    if len(output) < sampling.min_tokens:
        for token in (*end_tokens, *sampling.stop_token_ids):
            row[token] = masked
    return torch.tensor(row, dtype=torch.float64)
