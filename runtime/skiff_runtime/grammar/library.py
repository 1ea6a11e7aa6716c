"""xgrammar, imported without transformers.

It imports that for a few names which it needs only where it is given a tokenizer of theirs, and here it never is (nor
could it be then). That is most of the time that the import takes: seconds, at the start of a rank and of a compiler,
from a disk that has to be read. So something else of that name stands there meanwhile, unless somebody has imported
the real one before.
"""

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import xgrammar

__all__ = ["xgrammar"]

_WANTED: Final = "xgrammar"
_UNUSED: Final = "transformers"


class _StandIn(ModuleType):
    """Holds a class of any name."""

    def __init__(self) -> None:
        super().__init__(_UNUSED)
        self.__spec__ = ModuleSpec(_UNUSED, None)

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def _load() -> ModuleType:
    if _UNUSED not in sys.modules:
        sys.modules[_UNUSED] = _StandIn()
        try:
            return import_module(_WANTED)
        except ImportError:  # a version that wants more of it
            for name in [name for name in sys.modules if name.partition(".")[0] == _WANTED]:
                del sys.modules[name]
        finally:
            del sys.modules[_UNUSED]
    return import_module(_WANTED)


if not TYPE_CHECKING:
    xgrammar = _load()
