"""Settings of property tests that play random histories."""

from collections.abc import Collection

from hypothesis import HealthCheck, settings


def examples(count: int, suppressed: Collection[HealthCheck] = tuple(HealthCheck)) -> settings:
    """Return the settings of a test that draws ``count`` histories, always the same ones, without ``suppressed`` checks."""
    return settings(
        max_examples=count, deadline=None, derandomize=True, suppress_health_check=list(suppressed)
    )
