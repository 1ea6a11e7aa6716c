"""Reference for logits processors: bias, penalties and masks, one token after another in float64."""

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
    """Return one row [vocab] in float64.

    Tokens that end an answer before ``min_tokens``, and those that complete a bad word, get the logit ``masked``.
    """
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
    for *before, last in sampling.bad_words:
        if output[len(output) - len(before) :] == before and len(output) >= len(before):
            row[last] = min(row[last], masked)
    if sampling.allowed_token_ids:
        row = [
            logit if token in sampling.allowed_token_ids else -torch.inf for token, logit in enumerate(row)
        ]
    return torch.tensor(row, dtype=torch.float64)
