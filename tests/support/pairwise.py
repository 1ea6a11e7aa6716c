"""A few combinations of a test's parameters, where all combinations would take too long."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def cover_pairs(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return a few combinations of one value of each axis that contain every pair of values of any two axes.

    Values must be hashable.
    """

    def pairs(combination: tuple[Any, ...]) -> set[Any]:
        return set(itertools.combinations(enumerate(combination), 2))

    return _cover(list(itertools.product(*axes)), pairs)


def cover_values(*axes: Sequence[Any], rounds: int = 2) -> list[tuple[Any, ...]]:
    """Return a few combinations in which each value of the longest axis meets ``rounds`` values of the others.

    So every value of every axis occurs. On an axis of fewer than ``rounds`` values some occur again.
    """
    lengths = [len(axis) for axis in axes]
    longest = lengths.index(max(lengths))
    return [
        tuple(
            axis[(number + (turn if place != longest else 0)) % len(axis)] for place, axis in enumerate(axes)
        )
        for turn in range(rounds)
        for number in range(lengths[longest])
    ]


def cover_pairs_and_mark(*axes: Sequence[Any]) -> list[Any]:
    """Return ``cover_pairs`` as parameters of a test; a few contain every value, and the others are marked ``matrix``."""
    pairs = cover_pairs(*axes)
    return _mark_beyond(_cover(pairs, lambda combination: set(enumerate(combination))), pairs)


def mark_beyond_pairs(*axes: Sequence[Any]) -> list[Any]:
    """Return all combinations as parameters of a test; those that ``cover_pairs`` leaves out are marked ``matrix``."""
    return _mark_beyond(cover_pairs(*axes), itertools.product(*axes))


def mark_beyond_values(*axes: Sequence[Any], rounds: int = 2) -> list[Any]:
    """The same for those that ``cover_values`` leaves out."""
    return _mark_beyond(cover_values(*axes, rounds=rounds), itertools.product(*axes))


def _cover(
    candidates: Sequence[tuple[Any, ...]], find_parts: Callable[[tuple[Any, ...]], set[Any]]
) -> list[tuple[Any, ...]]:
    """Return a few candidates that together have all parts of all candidates, found greedily, the first of equals first."""
    missing = set().union(*map(find_parts, candidates))
    chosen: list[tuple[Any, ...]] = []
    while missing:
        best = max(candidates, key=lambda candidate: len(find_parts(candidate) & missing))
        missing -= find_parts(best)
        chosen.append(best)
    return chosen


def _mark_beyond(chosen: Sequence[tuple[Any, ...]], combinations: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Return combinations as parameters of a test; those that are not chosen are marked ``matrix``."""
    ordinary = set(chosen)
    return [
        pytest.param(*combination, marks=[] if combination in ordinary else pytest.mark.matrix)
        for combination in combinations
    ]
