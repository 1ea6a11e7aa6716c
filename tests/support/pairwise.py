"""A few combinations of a test's parameters, where all combinations would take too long."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def cover_pairs(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return a few combinations of one value of each axis that contain every pair of values of any two axes.

    They are found greedily, the first of equally good ones first. Values must be hashable.
    """

    def pairs(combination: tuple[Any, ...]) -> set[tuple[tuple[int, Any], ...]]:
        return set(itertools.combinations(enumerate(combination), 2))

    candidates = list(itertools.product(*axes))
    missing = set().union(*map(pairs, candidates))
    chosen: list[tuple[Any, ...]] = []
    while missing:
        best = max(candidates, key=lambda combination: len(pairs(combination) & missing))
        missing -= pairs(best)
        chosen.append(best)
    return chosen


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
    missing = {(place, value) for place, axis in enumerate(axes) for value in axis}
    few = set()
    while missing:
        best = max(pairs, key=lambda combination: len(set(enumerate(combination)) & missing))
        missing -= set(enumerate(best))
        few.add(best)
    return [
        pytest.param(*combination, marks=[] if combination in few else pytest.mark.matrix)
        for combination in pairs
    ]


def mark_beyond_pairs(*axes: Sequence[Any]) -> list[Any]:
    """Return all combinations as parameters of a test; those that ``cover_pairs`` leaves out are marked ``matrix``."""
    return _mark_beyond(cover_pairs(*axes), axes)


def mark_beyond_values(*axes: Sequence[Any], rounds: int = 2) -> list[Any]:
    """The same for those that ``cover_values`` leaves out."""
    return _mark_beyond(cover_values(*axes, rounds=rounds), axes)


def _mark_beyond(chosen: Sequence[tuple[Any, ...]], axes: Sequence[Sequence[Any]]) -> list[Any]:
    ordinary = set(chosen)
    return [
        pytest.param(*combination, marks=[] if combination in ordinary else pytest.mark.matrix)
        for combination in itertools.product(*axes)
    ]
