"""Whether two answers part only because a rounding error chose between two tokens.

Sums in another order differ in their last bits, and among a hundred thousand tokens some lead over the
next best is smaller than that. Such a place is a tie if models whose weights are off by no more than
rounding errors also take there now the one token, now the other, with each request alone.
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
"""A tie shows the same side in all of them once in 2,000 times."""
RELATIVE_ERROR: Final = 3e-7
"""Of each weight: five roundings to float32, which moves a logit by about what one forward pass loses."""


@dataclass(frozen=True, slots=True)
class Parting:
    """Two answers to request ``number``: their tokens up to the first that differs."""

    number: int
    ways: tuple[tuple[int, ...], tuple[int, ...]]


def find_parting(number: int, one: Answer, other: Answer) -> Parting | None:
    """Where two whole answers of one choice part; None unless all before it agrees, log-probabilities too."""
    if not (one.status == other.status == 200 and one.finished and other.finished):
        return None
    [some], [others] = one.choices.values(), other.choices.values()
    pairs = enumerate(zip(some.tokens, others.tokens, strict=False))
    place = next((place for place, (token, told) in pairs if token != told), None)
    if place is None or unlike_logprobs(some, others, before=place) is not None:
        return None
    return Parting(number, (tuple(some.tokens[: place + 1]), tuple(others.tokens[: place + 1])))


def find_ties(
    model: Path, partings: Sequence[Parting], answer: Callable[[Path, Sequence[int]], Sequence[Answer]]
) -> list[int]:
    """Numbers of the requests that part at a tie; ``answer(model, numbers)`` answers each of them alone."""
    if not partings:
        return []
    numbers = [parting.number for parting in partings]
    seen: list[set[tuple[int, ...]]] = [set() for _ in partings]
    for seed in range(MODELS):
        with TemporaryDirectory() as folder:
            answers = answer(_near(model, Path(folder) / model.name, seed), numbers)
        for ways, parting, told in zip(seen, partings, answers, strict=True):
            [choice] = told.choices.values()
            ways.add(tuple(choice.tokens[: len(parting.ways[0])]))
    return [each.number for ways, each in zip(seen, partings, strict=True) if ways == set(each.ways)]


def _near(model: Path, copy: Path, seed: int) -> Path:
    """A copy of ``model`` with each weight off by a random rounding error."""
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
