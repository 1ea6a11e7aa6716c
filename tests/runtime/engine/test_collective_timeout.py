"""The limit on a rank's wait for another one in a collective follows the step watchdog's."""

import pytest

from skiff_runtime.config import Config
from skiff_runtime.engine.engine import MIN_COLLECTIVE_TIMEOUT_SECONDS, collective_timeout
from skiff_runtime.processes.resolve import WATCHDOG_SECONDS


@pytest.mark.parametrize(
    ("watchdog_timeout", "seconds"),
    [
        (WATCHDOG_SECONDS["cuda"], 60.0),
        (600.0, 300.0),
        (20.0, MIN_COLLECTIVE_TIMEOUT_SECONDS),
        (None, MIN_COLLECTIVE_TIMEOUT_SECONDS),
    ],
)
def test_limit_is_half_of_the_watchdogs_but_outlasts_a_compilation(
    watchdog_timeout: float | None, seconds: float
) -> None:
    assert collective_timeout(Config(watchdog_timeout=watchdog_timeout)) == seconds
