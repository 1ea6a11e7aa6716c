"""Sampling of tokens from logits, on any device."""

import torch

from skiff_runtime.kernels.gumbel import add_gumbel
from skiff_runtime.kernels.top_k_top_p import find_thresholds
from skiff_runtime.step import NAN_LOGITS


def sample_tokens(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    seeds: torch.Tensor,
    sampling_params: torch.Tensor,
    token_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sample tokens int [S] from logits [S, vocab]: the most likely where the temperature is 0, else a draw.

    logits          [S, vocab] of any floating type
    slots           int [S]
    positions       int [S]: where the tokens will stand
    seeds           int64 [slots]
    sampling_params float32 [slots, 4]: temperature, top_k, top_p, min_p
    token_table     int32 [slots, n] or None: the tokens are also written to (slot, position)

    A row that contains NaN gets ``NAN_LOGITS``, and token 0 in the table, because a step in flight may look up its
    embedding.
    """
    if logits.device.type == "cuda":
        from skiff_runtime.kernels.triton.sampling import sample_tokens as kernel

        return kernel.sample_tokens(logits, slots, positions, seeds, sampling_params, token_table)
    sampling_params = sampling_params[slots]
    temperature, _, _, min_p = sampling_params.unbind(1)
    scaled = logits.float() / torch.where(temperature > 0, temperature, 1.0)[:, None]
    largest, greedy = scaled.max(-1)  # unlike comparisons, max propagates NaN
    threshold = torch.maximum(largest + min_p.log(), find_thresholds(scaled, sampling_params))
    scaled.masked_fill_(scaled < threshold[:, None], -torch.inf)
    drawn = add_gumbel(scaled, seeds[slots], positions).argmax(-1)
    tokens = torch.where(temperature > 0, drawn, greedy).masked_fill_(largest.isnan(), NAN_LOGITS)
    if token_table is not None:
        token_table[slots, positions] = tokens.clamp(min=0).to(token_table.dtype)
    return tokens
