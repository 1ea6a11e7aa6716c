"""Random batches of logits and sampling parameters, in every combination that a sampler must get right."""

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.random import Generator

from skiff_runtime.distributed.vocab_shard import VocabShard
from skiff_runtime.engine.input_batch import SampledRows
from skiff_runtime.engine.sampler import Sampler
from skiff_runtime.messages import SamplingSpec
from skiff_runtime.step import SlotOpened

TEMPERATURES: Final = (0.0, 1e-6, 1e-5, 0.3, 1.0, 5.0)
TOP_PS: Final = (1.0, 1.0, 1.0, 0.0, 1e-6, 0.5, 0.9, 0.999999)
MIN_PS: Final = (0.0, 0.0, 0.0, 0.05, 1.0)
KINDS: Final = 12
"""The ways in which ``_fill`` makes a row."""


@dataclass(frozen=True)
class SamplingCase:
    """Logits float32 [rows, vocab], and the parameters and the position of each row."""

    logits: torch.Tensor
    samplings: list[SamplingSpec]
    positions: list[int]


def make_case(seed: int, rows: int, vocab: int, *, filtered: bool = True) -> SamplingCase:
    """Make a case; without ``filtered`` no row requests top_k, top_p or min_p."""
    random = np.random.default_rng([seed, rows, vocab])
    logits = torch.stack([torch.from_numpy(_fill(random, vocab)) for _ in range(rows)])
    samplings = [_parameters(random, vocab, filtered=filtered) for _ in range(rows)]
    return SamplingCase(logits, samplings, random.integers(0, 100_000, rows).tolist())


def shard_logits(logits: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """Return a rank's shard of logits [rows, vocab]; its padding would win if anything took it for logits."""
    own = torch.full((len(logits), shard.size), torch.inf, dtype=logits.dtype, device=logits.device)
    own[1::2] = torch.nan
    own[:, : shard.stop - shard.start] = logits[:, shard.start : shard.stop]
    return own


def open_sampler(
    case: SamplingCase, device: torch.device, shard: VocabShard | None = None, *, spare_slots: int = 0
) -> Sampler:
    """Return a sampler in which slot i has the parameters of row i."""
    sampler = Sampler(len(case.samplings) + spare_slots, device, shard)
    nothing = np.empty(0, np.int32)
    sampler.open([SlotOpened(slot, nothing, sampling, 0) for slot, sampling in enumerate(case.samplings)])
    return sampler


def sample_case(case: SamplingCase, device: torch.device, shard: VocabShard | None = None) -> list[int]:
    """Sample every row, from ``shard`` of its logits or from all of them."""
    logits = case.logits if shard is None else shard_logits(case.logits, shard)
    columns = np.stack((np.arange(len(logits)), case.positions)).astype(np.int32)
    rows = SampledRows(*torch.from_numpy(columns).long().to(device), *columns)
    tokens: list[int] = open_sampler(case, device, shard).sample(logits.to(device), rows).tolist()
    return tokens


def _fill(random: Generator, vocab: int) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
    """Return a row: usual, peaked, flat, with ties anywhere, masked, infinite, or with NaN of either sign."""
    kind = int(random.integers(KINDS))
    row = random.standard_normal(vocab).astype(np.float32) * (12 if kind == 1 else 2)
    some = random.integers(0, vocab, 4)
    some[0] = random.choice([0, vocab - 1])
    if kind == 2:
        row = row.round()
    elif kind == 3:
        row[random.random(vocab) < 0.5] = -np.inf
    elif kind == 4:
        row[:] = -np.inf
    elif kind == 5:
        row[some] = np.nan
    elif kind == 6:
        row[some] = np.inf
    elif kind == 7:
        row[:] = row[0]
    elif kind == 8:
        row = random.choice(np.array([-0.0, 0.0, -1.0], np.float32), vocab)
    elif kind == 9:
        row[some] = row.max() + 1
    elif kind == 10:
        row[some] = np.array([0xFFC00001], np.uint32).view(np.float32)
    elif kind == 11:
        row[:] = -np.inf
        row[some] = -3.0
    return row


def _parameters(random: Generator, vocab: int, *, filtered: bool) -> SamplingSpec:
    seed, temperature = int(random.integers(-(1 << 62), 1 << 63)), float(random.choice(TEMPERATURES))
    if not filtered:
        return SamplingSpec(max_tokens=1, seed=seed, temperature=temperature)
    return SamplingSpec(
        max_tokens=1,
        seed=seed,
        temperature=temperature,
        top_k=int(random.choice([0, 0, 1, 2, int(random.integers(1, vocab + 1)), vocab, vocab + 1])),
        top_p=float(random.choice(TOP_PS)),
        min_p=float(random.choice(MIN_PS)),
    )
