"""Imports that leave the interpreter's lock to other threads.

A thread that imports holds the lock for most of the time, and each PyTorch operation of another thread gives it up and
asks for it again. So an import of a second in the background stops decode steps for about a second. A paced import
sleeps before each module, longer while steps run, and shortens the interpreter's switch interval. It takes ten seconds
in an idle process and eight minutes in one that is always busy, where one step in a few hundred is slower.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from time import monotonic
from types import ModuleType
from typing import Final

PAUSE_SECONDS: Final = 0.02
"""The pause before each module. xgrammar and transformers have about 470 modules, which take 2 ms on average."""
BUSY_PAUSE_SECONDS: Final = 1.0
"""The longest pause before a module, which ends as soon as the process is not busy."""
SWITCH_SECONDS: Final = 1e-4
"""The longest wait of another thread for the lock while a module is executed; Python's default is 5 ms."""


class _Pacer:
    """A finder that finds nothing: Python asks it first for each module that is not imported yet."""

    def __init__(self, hurry: threading.Event, is_busy: Callable[[], bool]) -> None:
        self._hurry = hurry
        self._is_busy = is_busy
        self._thread = threading.get_ident()

    def find_spec(
        self, _name: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if threading.get_ident() == self._thread:
            deadline = monotonic() + BUSY_PAUSE_SECONDS
            while not self._hurry.wait(PAUSE_SECONDS) and self._is_busy() and monotonic() < deadline:
                pass
        return None


@contextmanager
def paced_imports(hurry: threading.Event, is_busy: Callable[[], bool]) -> Iterator[None]:
    """Pace the imports of this thread until ``hurry`` is set. ``is_busy()`` returns True while steps run."""
    pacer, before = _Pacer(hurry, is_busy), sys.getswitchinterval()
    # The list is replaced, not changed: an import of another thread may be at any place in it.
    sys.meta_path = [pacer, *sys.meta_path]
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
        sys.meta_path = [each for each in sys.meta_path if each is not pacer]
