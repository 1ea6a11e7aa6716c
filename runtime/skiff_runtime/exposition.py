"""Prometheus' text format, for numbers that change with every token and are read every 50 milliseconds.

Names and labels of all series are rendered once; a page then costs one formatted number a line.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
Labels = tuple[str, ...]


class Family:
    """One metric. ``labels`` are names; a series is known by their values, in the same order."""

    kind = "untyped"

    def __init__(self, name: str, text: str, labels: Labels = ()) -> None:
        self.name = name
        self.labels = labels
        self.header = f"# HELP {name} {text}\n# TYPE {name} {self.kind}\n"

    def render(self) -> str:
        """The lines of this metric."""
        raise NotImplementedError

    def _series(self, values: Sequence[str], suffix: str = "", **more: str) -> str:
        """``name_suffix{label="value",...}`` and a space."""
        assert len(values) == len(self.labels), (self.name, values)
        pairs = [*zip(self.labels, values, strict=True), *more.items()]
        assert not any(mark in value for _, value in pairs for mark in '"\\\n'), pairs
        inside = ",".join(f'{label}="{value}"' for label, value in pairs)
        return f"{self.name}{suffix}{{{inside}}} " if inside else f"{self.name}{suffix} "


class Counter(Family):
    """Numbers that only grow."""

    kind = "counter"

    def __init__(self, name: str, text: str, labels: Labels = ()) -> None:
        super().__init__(name, text, labels)
        self._values: dict[Labels, float] = {}
        self._prefixes: dict[Labels, str] = {}
        if not labels:
            self.add(0)

    def add(self, amount: float, *values: str) -> None:
        """Add to one series; adding 0 makes it appear."""
        self._set(values, self._values.get(values, 0) + amount)

    def render(self) -> str:
        lines = [f"{self._prefixes[values]}{number}\n" for values, number in self._values.items()]
        return self.header + "".join(lines)

    def _set(self, values: Labels, number: float) -> None:
        if values not in self._prefixes:
            self._prefixes[values] = self._series(values)
        self._values[values] = number


class Gauge(Counter):
    """Numbers that go up and down."""

    kind = "gauge"

    def set(self, number: float, *values: str) -> None:
        """Set one series."""
        self._set(values, number)

    def clear(self) -> None:
        """Forget all series, where label values change with the numbers."""
        self._values.clear()
        self._prefixes.clear()


class Distribution:
    """Counts of observations at or below each bound; cheapest where equal values follow each other."""

    __slots__ = ("_bounds", "_last", "_slot", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self._last = -1.0
        self._slot = 0

    def observe(self, value: float) -> None:
        """Count one value."""
        if value != self._last:
            self._last = value
            self._slot = bisect_left(self._bounds, value)
        self.counts[self._slot] += 1
        self.sum += value


class Histogram(Family):
    """Distributions with the same bounds, one a series, all of them known from the start."""

    kind = "histogram"

    def __init__(
        self,
        name: str,
        text: str,
        bounds: Sequence[float],
        labels: Labels = (),
        series: Sequence[Labels] = ((),),
    ) -> None:
        super().__init__(name, text, labels)
        self._distributions = {values: Distribution(bounds) for values in series}
        limits = [*(f"{bound:g}" for bound in bounds), "+Inf"]
        self._prefixes = {
            values: [self._series(values, "_bucket", le=limit) for limit in limits] for values in series
        }
        self._totals = {
            values: (self._series(values, "_sum"), self._series(values, "_count")) for values in series
        }

    def of(self, *values: str) -> Distribution:
        """One series' distribution."""
        return self._distributions[values]

    def render(self) -> str:
        lines = [self.header]
        for values, distribution in self._distributions.items():
            total = 0
            for prefix, count in zip(self._prefixes[values], distribution.counts, strict=True):
                total += count
                lines.append(f"{prefix}{total}\n")
            sum_prefix, count_prefix = self._totals[values]
            lines.append(f"{sum_prefix}{distribution.sum}\n{count_prefix}{total}\n")
        return "".join(lines)
