"""xgrammar, imported without transformers.

It imports that for a few names which it needs only where it is given a tokenizer of theirs, and here it never is. That
is most of the time that the import takes: seconds, at the start of a rank and of a compiler, from a disk that has to be
read. So something else of that name stands there meanwhile, unless somebody has imported the real one before.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import xgrammar

__all__ = ["xgrammar"]

_UNUSED: Final = "transformers"


class _StandIn(ModuleType):
    """Holds a class of any name."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def _load() -> ModuleType:
    if _UNUSED in sys.modules:
        return import_module("xgrammar")
    sys.modules[_UNUSED] = _StandIn(_UNUSED)
    try:
        return import_module("xgrammar")
    finally:
        del sys.modules[_UNUSED]


if not TYPE_CHECKING:
    xgrammar = _load()
