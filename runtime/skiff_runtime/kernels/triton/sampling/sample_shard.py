"""Sampling of tokens from one rank's shard of the logits; a maximum of keys over the ranks chooses the token.

The scores are those of ``sample_tokens``, computed by the same functions from the same numbers, and the noise is a
hash of the token's id in the whole vocabulary. So the best score over all shards is, bit for bit, the best over the
whole row, whichever rank finds it. What a rank contributes is one sampling key for each row (``kernels.sampling_keys``
defines them). Three launches, of which the last follows the exchange:

    sample_shard_kernel         the best key of each block of a row's shard
    max_sampling_keys_kernel    the best key of a row's shard
    take_sampled_tokens_kernel  after the exchange, the token of each row's key
"""

import torch
import triton
import triton.language as tl

from skiff_runtime.kernels.sampling_keys import LOWEST_KEY, NAN_KEY, TOKEN_BITS, TOKEN_MASK
from skiff_runtime.kernels.triton.runtime.dependent_launch import (
    launch_dependents,
    pdl_options,
    wait_for_dependencies,
)
from skiff_runtime.kernels.triton.sampling.sample_tokens import best_token, noisy_scores
from skiff_runtime.kernels.tuning import tuning_for
from skiff_runtime.step import NAN_LOGITS

_TOKEN_BITS = tl.constexpr(TOKEN_BITS)
_TOKEN_MASK = tl.constexpr(TOKEN_MASK)
_NAN_KEY = tl.constexpr(NAN_KEY)
_LOWEST_KEY = tl.constexpr(LOWEST_KEY)
_NAN_LOGITS = tl.constexpr(NAN_LOGITS)


@triton.jit
def _encode_key(score: tl.tensor, token: tl.tensor) -> tl.tensor:
    """Return the sampling key int64 of a score, which is no NaN, and its token."""
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (order.to(tl.int64) << _TOKEN_BITS) | (token.to(tl.int64) ^ _TOKEN_MASK)


@triton.jit(do_not_specialize=["first_token"], do_not_specialize_on_alignment=["slots", "positions"])
def sample_shard_kernel(
    logits: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    seeds: tl.tensor,
    sampling_params: tl.tensor,
    keys: tl.tensor,
    stride: tl.tensor,
    first_token: tl.tensor,
    VOCAB: tl.constexpr,
    SHARD: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    FAST: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Find the best token of one block of one row's shard.

    Grid: (rows, blocks of BLOCK logits).

    logits              [rows, SHARD] of any floating type, rows ``stride`` apart: those of token ``first_token`` and on
    slots, positions    int32 [rows]: the row's slot, and where its token will stand
    seeds               int64 [slots]
    sampling_params     float32 [slots, 4]: temperature (0: greedy); the others are not read
    keys                int64 [rows, BLOCKS], written: the best sampling key
    FAST                whether to take the GPU's approximate logarithm, which Triton's interpreter lacks

    Columns of no token, those from VOCAB on, count as -inf: real tokens that are masked so have lower ids, and win. A
    block that contains NaN has the key of NaN, which wins over every other.
    """
    launch_dependents(PDL)
    wait_for_dependencies(PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    column = block * BLOCK + tl.arange(0, BLOCK)
    token = first_token + column
    inside = (column < SHARD) & (token < VOCAB)
    score = tl.load(logits + row * stride + column, inside, -float("inf")).to(tl.float32)
    has_nan = tl.max((score != score).to(tl.int32), 0) > 0
    temperature = tl.load(sampling_params + slot * 4)
    if temperature > 0:
        score = noisy_scores(score, temperature, tl.load(seeds + slot), tl.load(positions + row), token, FAST)
    best, candidate = best_token(score, token)
    tl.store(keys + row * BLOCKS + block, tl.where(has_nan, _NAN_KEY, _encode_key(best, candidate)))


@triton.jit
def max_sampling_keys_kernel(
    block_keys: tl.tensor,
    keys: tl.tensor,
    BLOCKS: tl.constexpr,
    BLOCKS_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Find the best key of one row's shard.

    Grid: (rows), one warp each.

    block_keys          int64 [rows, BLOCKS]
    keys                int64 [rows], written
    """
    launch_dependents(PDL)
    wait_for_dependencies(PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS_BLOCK)
    key = tl.load(block_keys + row * BLOCKS + block, block < BLOCKS, _LOWEST_KEY)
    tl.store(keys + row, tl.max(key, 0))


@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def take_sampled_tokens_kernel(
    keys: tl.tensor,
    tokens: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    token_table: tl.tensor,
    token_table_stride: tl.tensor,
    HAS_TABLE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Take the token out of one row's key.

    Grid: (rows), one warp each.

    keys                int64 [rows]: the best of all ranks
    tokens              int32 [rows], written
    slots, positions    int32 [rows]
    token_table         int32 [slots, token_table_stride]: with HAS_TABLE, the token is also written to [slot,
                        position]; token 0 in place of _NAN_LOGITS, because the step in flight looks up its embedding
    """
    launch_dependents(PDL)
    wait_for_dependencies(PDL)
    row = tl.program_id(0).to(tl.int64)
    key = tl.load(keys + row)
    token = ((key & _TOKEN_MASK) ^ _TOKEN_MASK).to(tl.int32)
    token = tl.where(key == _NAN_KEY, _NAN_LOGITS, token)
    tl.store(tokens + row, token)
    if HAS_TABLE:
        slot = tl.load(slots + row).to(tl.int64)
        tl.store(token_table + slot * token_table_stride + tl.load(positions + row), tl.maximum(token, 0))


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
    """Do what ``kernels.sampling.find_best_keys`` does, with logits of any floating type and rows at any stride."""
    (rows, columns), device = logits.shape, logits.device
    tuning = tuning_for(device)
    blocks = triton.cdiv(columns, tuning.sampling_block)
    block_keys = torch.empty((rows, blocks), dtype=torch.int64, device=device)
    keys = torch.empty(rows, dtype=torch.int64, device=device)
    if rows == 0:
        return keys
    options = pdl_options(device)
    sample_shard_kernel[(rows, blocks)](
        logits,
        slots,
        positions,
        seeds,
        sampling_params,
        block_keys,
        logits.stride(0),
        first_token,
        VOCAB=vocab_size,
        SHARD=columns,
        BLOCKS=blocks,
        BLOCK=tuning.sampling_block,
        FAST=device.type == "cuda",
        num_warps=tuning.sampling_warps,
        **options,
    )
    max_sampling_keys_kernel[(rows,)](
        block_keys,
        keys,
        BLOCKS=blocks,
        BLOCKS_BLOCK=triton.next_power_of_2(blocks),
        num_warps=1,
        **options,
    )
    return keys


def take_tokens(
    keys: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    token_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the tokens int32 [S] of the best keys int64 [S], and write them to the table if there is one."""
    tokens = torch.empty(len(keys), dtype=torch.int32, device=keys.device)
    if len(keys) == 0:
        return tokens
    take_sampled_tokens_kernel[(len(keys),)](
        keys,
        tokens,
        slots,
        positions,
        tokens if token_table is None else token_table,
        0 if token_table is None else token_table.stride(0),
        HAS_TABLE=token_table is not None,
        num_warps=1,
        **pdl_options(keys.device),
    )
    return tokens
