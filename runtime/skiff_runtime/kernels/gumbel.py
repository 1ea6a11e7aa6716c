"""Gumbel noise without state: a function of (seed, position, token id) alone, on any device.

The argmax of log-probabilities plus Gumbel noise is a draw from the distribution (Gumbel, 1954; Maddison et al.,
2014). As no generator is advanced, a request's tokens do not depend on what else is in its batch, on the rank, or on
when the step runs.
"""

from typing import Final

import torch

BLOCK_ELEMENTS: Final = 1 << 18
"""Elements hashed at a time, so that the work stays in a CPU's cache."""
_LOW32: Final = (1 << 32) - 1
_LOW33: Final = (1 << 33) - 1
_BITS: Final = 23


def add_gumbel(
    logits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, *, first_token: int = 0
) -> torch.Tensor:
    """Add noise to float32 logits [S, V] in place, by ``seeds`` and ``positions`` int64 [S]; return them.

    The columns are those of the tokens ``first_token`` and on.
    """
    first = _mix64(seeds * _signed(0x9E3779B97F4A7C15, 64) + positions)
    second = _mix64(first + positions)
    columns = logits.shape[1]
    ids = torch.arange(first_token, first_token + columns, device=logits.device)
    tokens = _wrap(ids * 0x9E3779B1)
    step = max(1, BLOCK_ELEMENTS // columns)
    for at in range(0, logits.shape[0], step):
        rows = slice(at, at + step)
        hashed = _hash(tokens, _wrap(first[rows, None]), _wrap(second[rows, None]))
        logits[rows] += _gumbel(hashed)
    return logits


def _gumbel(hashed: torch.Tensor) -> torch.Tensor:
    """Return -log(-log(u)) of int32 hashes, where u is uniform in (0, 1), of 23 bits, and so never exactly 0 or 1."""
    bits = _shift_right(hashed, 32 - _BITS)
    uniform = bits.float().add_(0.5).mul_(2.0**-_BITS)
    return uniform.log_().neg_().log_().neg_()


def _hash(tokens: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Hash int32 tokens [V] with keys [S, 1] to int32 [S, V]: Murmur3's finalizer with a second key in it."""
    mixed = tokens ^ first
    mixed ^= _shift_right(mixed, 16)
    mixed *= _signed(0x85EBCA6B, 32)
    mixed += second
    mixed ^= _shift_right(mixed, 13)
    mixed *= _signed(0xC2B2AE35, 32)
    mixed ^= _shift_right(mixed, 16)
    return mixed


def _shift_right(values: torch.Tensor, count: int) -> torch.Tensor:
    """Shift int32 right, with zeros coming in."""
    return (values >> count).bitwise_and_((1 << (32 - count)) - 1)


def _mix64(values: torch.Tensor) -> torch.Tensor:
    """Apply two rounds of a 64-bit multiply-and-shift finalizer (after SplitMix64) to int64, wrapping."""
    for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
        values = (values ^ ((values >> 31) & _LOW33)) * _signed(factor, 64)
    return values ^ ((values >> 31) & _LOW33)


def _wrap(values: torch.Tensor) -> torch.Tensor:
    """Return the low 32 bits of int64 values as int32."""
    low = values & _LOW32
    return torch.where(low >= 1 << 31, low - (1 << 32), low).int()


def _signed(value: int, bits: int) -> int:
    """Return the number whose two's complement is ``value``."""
    return value - (1 << bits) if value >> (bits - 1) else value
