"""Pairwise combinations of a test's parameters, where all combinations would take too long."""

import itertools
from collections.abc import Sequence
from typing import Any


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
