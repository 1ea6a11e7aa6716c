"""An event is one line of printable text, whatever its fields contain."""

import logging

import pytest

from skiff_runtime import log


def log_line(caplog: pytest.LogCaptureFixture, value: object) -> str:
    with caplog.at_level(logging.INFO, logger="skiff"):
        log.event("request", user=value)
    return caplog.messages[-1]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("ann", "ann"),
        ("東京", "東京"),
        (0.125, "0.125"),
        ("", '""'),
        ("a b", '"a b"'),
        ("a\nb", '"a\\nb"'),
        ("\0", '"\\u0000"'),
        ("\x1b[2J", '"\\u001b[2J"'),
        ("\u2028", '"\\u2028"'),
        ("\u202e", '"\\u202e"'),
        ("\ud800", '"\\ud800"'),
    ],
)
def test_values_are_printed_or_escaped(caplog: pytest.LogCaptureFixture, value: object, shown: str) -> None:
    line = log_line(caplog, value)
    assert line == f"request user={shown}"
    assert line.isprintable()
