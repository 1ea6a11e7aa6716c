"""Interrupts (Ctrl-C) of processes that tests start."""

import signal


def heed_interrupts() -> None:
    """Restore the default action of SIGINT, as a ``preexec_fn``: background processes of a shell ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
