"""Pairwise combinations of a test's parameters, where all combinations would take too long."""

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


def mark_beyond_pairs(*axes: Sequence[Any]) -> list[Any]:
    """Return all combinations as parameters of a test; those that ``cover_pairs`` leaves out are marked ``matrix``."""
    pairwise = set(cover_pairs(*axes))
    return [
        pytest.param(*combination, marks=[] if combination in pairwise else pytest.mark.matrix)
        for combination in itertools.product(*axes)
    ]
