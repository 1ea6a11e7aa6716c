"""Near ties: two answers that diverge only because a rounding error decided between two tokens.

Sums in another order differ in their last bits, and among 100,000 tokens some lead over the second-best is
smaller than that. A divergence is a near tie if models whose weights are perturbed by rounding errors choose
both tokens there, with each request alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import torch
from answers import Answer, unlike_logprobs
from safetensors.torch import load_file, save_file

MODELS: Final = 12
"""Perturbed models. All of them choose the same token of a tie once in 2,000 times."""
RELATIVE_ERROR: Final = 3e-7
"""Of each weight: five roundings to float32. It moves a logit by about the error of one forward pass."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """Two answers to request ``number``: their tokens up to the first that differs."""

    number: int
    ways: tuple[tuple[int, ...], tuple[int, ...]]


def find_divergence(number: int, one: Answer, other: Answer) -> Divergence | None:
    """Return the divergence of two finished answers of one choice; None unless all before it agrees, log-probabilities too."""
    if not (one.status == other.status == 200 and one.finished and other.finished):
        return None
    [some], [others] = one.choices.values(), other.choices.values()
    pairs = enumerate(zip(some.tokens, others.tokens, strict=False))
    index = next((index for index, (token, other_token) in pairs if token != other_token), None)
    if index is None or unlike_logprobs(some, others, before=index) is not None:
        return None
    return Divergence(number, (tuple(some.tokens[: index + 1]), tuple(others.tokens[: index + 1])))


def find_ties(
    model: Path, divergences: Sequence[Divergence], answer: Callable[[Path, Sequence[int]], Sequence[Answer]]
) -> list[int]:
    """Return the numbers of requests that diverge at a near tie. ``answer(model, numbers)`` answers each of them alone."""
    if not divergences:
        return []
    numbers = [divergence.number for divergence in divergences]
    seen: list[set[tuple[int, ...]]] = [set() for _ in divergences]
    for seed in range(MODELS):
        with TemporaryDirectory() as folder:
            answers = answer(_perturb(model, Path(folder) / model.name, seed), numbers)
        for ways, divergence, found in zip(seen, divergences, answers, strict=True):
            [choice] = found.choices.values()
            ways.add(tuple(choice.tokens[: len(divergence.ways[0])]))
    return [each.number for ways, each in zip(seen, divergences, strict=True) if ways == set(each.ways)]


def _perturb(model: Path, copy: Path, seed: int) -> Path:
    """Copy ``model`` with a random rounding error added to each weight."""
    generator = torch.Generator().manual_seed(seed)
    copy.mkdir()
    for file in sorted(model.iterdir()):
        if file.suffix != ".safetensors":
            (copy / file.name).symlink_to(file.resolve())
            continue
        weights = load_file(file)
        for name, weight in sorted(weights.items()):
            noise = torch.randn(weight.shape, generator=generator)
            weights[name] = weight * (1 + RELATIVE_ERROR * noise)
        save_file(weights, copy / file.name, metadata={"format": "pt"})
    return copy
