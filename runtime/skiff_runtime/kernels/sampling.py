"""Sampling of tokens from logits, on any device."""

import torch

from skiff_runtime.kernels.gumbel import add_gumbel
from skiff_runtime.kernels.sampling_keys import LOWEST_KEY, decode_tokens, encode_keys
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


def find_best_keys(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    seeds: torch.Tensor,
    sampling_params: torch.Tensor,
    *,
    first_token: int,
    vocab_size: int,
) -> torch.Tensor:
    """Return the sampling keys int64 [S] (``sampling_keys``) of the best of some tokens, those of a vocabulary shard.

    Their logits are [S, tokens], of ``first_token`` and on; columns of tokens from ``vocab_size`` on are padding. The
    largest key over all shards is that of the token that ``sample_tokens`` returns for their concatenation, bit for bit,
    where no row requests top_k, top_p or min_p: these three are ignored, because what they drop depends on the whole
    row. The other arguments, and NaN, are those of ``sample_tokens``.
    """
    if logits.device.type == "cuda":
        from skiff_runtime.kernels.triton.sampling import sample_shard as kernel

        return kernel.find_best_keys(
            logits,
            slots,
            positions,
            seeds,
            sampling_params,
            first_token=first_token,
            vocab_size=vocab_size,
        )
    columns = min(logits.shape[1], vocab_size - first_token)
    if columns <= 0:
        return torch.full(slots.shape, LOWEST_KEY, dtype=torch.int64)
    temperature = sampling_params[slots, 0]
    scaled = logits[:, :columns].float() / torch.where(temperature > 0, temperature, 1.0)[:, None]
    scores, tokens = scaled.max(-1)
    drawn = (temperature > 0).nonzero().squeeze(1)
    if len(drawn):
        noisy = add_gumbel(scaled[drawn], seeds[slots[drawn]], positions[drawn], first_token=first_token)
        scores[drawn], tokens[drawn] = noisy.max(-1)
    return encode_keys(scores, tokens + first_token)


def take_tokens(
    keys: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    token_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the tokens int [S] of the best keys int64 [S] of all shards, as ``sample_tokens`` does."""
    if keys.device.type == "cuda":
        from skiff_runtime.kernels.triton.sampling import sample_shard as kernel

        return kernel.take_tokens(keys, slots, positions, token_table)
    tokens = decode_tokens(keys)
    if token_table is not None:
        token_table[slots, positions] = tokens.clamp(min=0).to(token_table.dtype)
    return tokens
