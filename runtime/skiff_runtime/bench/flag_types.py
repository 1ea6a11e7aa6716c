"""Types of the benchmarks' flags. Each raises argparse.ArgumentTypeError for a value that makes no sense."""

import argparse
import math
from dataclasses import dataclass
from typing import Final, Self

import numpy as np

MAX_COUNT: Final = 10_000_000


@dataclass(frozen=True, slots=True)
class LengthRange:
    """A range of lengths in tokens, from ``low`` to ``high`` inclusive, with a uniform distribution."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a length such as ``128``, or a range such as ``100:1024``."""
        low, colon, high = text.partition(":")
        try:
            lengths = cls(int(low), int(high) if colon else int(low))
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a length or LOW:HIGH, not {text!r}") from None
        if not 1 <= lengths.low <= lengths.high <= MAX_COUNT:
            raise argparse.ArgumentTypeError(f"needs 1 <= LOW <= HIGH <= {MAX_COUNT}, not {text!r}")
        return lengths

    def draw(self, generator: np.random.Generator) -> int:
        """Draw a length."""
        return int(generator.integers(self.low, self.high + 1))

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"


def positive_int(text: str) -> int:
    """Parse a whole number from 1 to ten million."""
    value = int(text) if text.isascii() and text.isdigit() else 0
    if not 1 <= value <= MAX_COUNT:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 to {MAX_COUNT}, not {text!r}")
    return value


def natural_int(text: str) -> int:
    """Parse a whole number from 0 to ten million."""
    return 0 if text == "0" else positive_int(text)


def positive_ints(text: str) -> tuple[int, ...]:
    """Parse whole numbers separated by commas."""
    return tuple(positive_int(each) for each in text.split(","))


def positive_float(text: str) -> float:
    """Parse a finite number above 0."""
    value = _parse_float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {text!r}")
    return value


def natural_float(text: str) -> float:
    """Parse a finite number, 0 or above."""
    return 0.0 if _parse_float(text) == 0 else positive_float(text)


def rates(text: str) -> tuple[float, ...]:
    """Parse different numbers above 0, or ``inf``, separated by commas."""
    found = tuple(math.inf if each == "inf" else positive_float(each) for each in text.split(","))
    if len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"names a rate twice: {text!r}")
    return found


def _parse_float(text: str) -> float:
    """Parse a number; anything else is NaN, which every range excludes."""
    try:
        return float(text)
    except ValueError:
        return math.nan
