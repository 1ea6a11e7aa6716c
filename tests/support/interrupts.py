"""Ctrl-C for processes that tests start."""

import signal


def heed_interrupts() -> None:
    """As at a terminal, for ``preexec_fn``; tests in the background of a shell inherit that SIGINT is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
