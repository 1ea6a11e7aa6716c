"""Which products of a quantized checkpoint are in the model's own type, by the modules that its ``config.json`` names.

compressed-tensors takes the names as they are, and what follows ``re:`` as a regular expression of how a path begins;
transformers takes all names of an FBGEMM checkpoint as regular expressions, each good for a module and all within it.
"""

import re
from typing import Any, Final

from skiff_runtime.errors import ModelError
from skiff_runtime.layers.projections import PACKED_MODULES, UnquantizedProjections

_EXPRESSION: Final = "re:"
_PLAIN: Final = re.compile(r"[\w.]+")
_MOST_EXPRESSIONS: Final = 64
"""Each is tried on every module; lists of plain names may be of any length."""


def find_unquantized_projections(source: str, names: Any, layers: int) -> UnquantizedProjections:
    """The products of ``layers`` decoder layers that ``names`` leave out; others, such as ``lm_head``, are no matter.

    Raises ``ModelError``, which begins with ``source``, for what is no list of names, and for a product only a part of
    which is left out.
    """
    modules = _Modules(source, names)
    found = []
    for layer in range(layers):
        for product, parts in PACKED_MODULES.items():
            paths = [f"model.layers.{layer}.{part}" for part in parts]
            out = [path for path in paths if path in modules]
            if out and len(out) < len(paths):
                kept = next(path for path in paths if path not in out)
                raise ModelError(
                    f"{source} leaves out {out[0]!r} but not {kept!r}, which is not supported: one product computes both"
                )
            if out:
                found.append((layer, product))
    return tuple(found)


class _Modules:
    """Modules that are named, one by one or by regular expressions."""

    def __init__(self, source: str, names: Any) -> None:
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ModelError(f"{source} must be a list of modules, not {names!r}")
        self._plain = frozenset(name for name in names if _PLAIN.fullmatch(name))
        others = [name for name in names if name not in self._plain]
        if len(others) > _MOST_EXPRESSIONS:
            raise ModelError(
                f"{source} has {len(others)} regular expressions; at most {_MOST_EXPRESSIONS} are read"
            )
        self._expressions = [_compile(source, name) for name in others]

    def __contains__(self, path: str) -> bool:
        """Whether a module, what it is within, or the end of its path is named."""
        words = path.split(".")
        inner = (".".join(words[start:]) for start in range(len(words)))
        outer = (".".join(words[:stop]) for stop in range(1, len(words)))
        if any(name in self._plain for name in (*inner, *outer)):
            return True
        return any(expression.match(path) for expression in self._expressions)


def _compile(source: str, name: str) -> re.Pattern[str]:
    """What of a path must match, from its beginning on: without ``re:``, up to the end of one of its names."""
    expression = name.removeprefix(_EXPRESSION)
    try:
        return re.compile(expression if name != expression else rf"(?:{expression})(?:(?<=\.)|(?=\.|$))")
    except re.error as error:
        raise ModelError(f"{source}: {expression!r} is no regular expression: {error}") from None
