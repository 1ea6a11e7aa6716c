"""Samples of a pod's page of metrics, in Prometheus' text format. Pure.

Anything may run behind a pod's port, so a line that is no sample is skipped, and every value is finite.
"""

from collections.abc import Iterator


def samples(page: str) -> Iterator[tuple[str, float]]:
    """Yield each series as it is written, with its labels, and its value; values below 0 and NaN are skipped."""
    for line in page.splitlines():
        series, _, text = line.rpartition(" ")
        if not series or series[0] == "#":
            continue
        try:
            value = float(text)
        except ValueError:
            continue
        if 0 <= value < float("inf"):
            yield series, value
