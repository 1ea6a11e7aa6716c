"""Imports that leave the interpreter's lock to other threads.

A thread that imports holds the lock for most of the time, and each PyTorch operation of another thread gives it up and
asks for it again. So an import of a second in the background stops decode steps for about a second. Paced, it pauses
before each module and gives the lock up soon within one: it takes ten seconds, in which steps are slightly slower.
"""

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Final

PAUSE_SECONDS: Final = 0.02
"""The pause before each module. xgrammar and transformers have about 470 modules, which take 2 ms on average."""
SWITCH_SECONDS: Final = 1e-4
"""The longest wait of another thread for the lock while a module is executed; Python's default is 5 ms."""


class _Pacer:
    """A finder that finds nothing: Python asks it first for each module that is not imported yet."""

    def __init__(self, hurry: threading.Event) -> None:
        self._hurry = hurry
        self._thread = threading.get_ident()

    def find_spec(
        self, _name: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if threading.get_ident() == self._thread:
            self._hurry.wait(PAUSE_SECONDS)
        return None


@contextmanager
def paced_imports(hurry: threading.Event) -> Iterator[None]:
    """Pace what this thread imports, until ``hurry`` is set."""
    pacer, before = _Pacer(hurry), sys.getswitchinterval()
    sys.meta_path.insert(0, pacer)
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
        sys.meta_path.remove(pacer)
