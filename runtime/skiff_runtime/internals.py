"""Checks of third-party internals: undocumented parts of a library that Skiff uses must have the expected shape.

For each such library, or part of one, one module imports its internals inside a ``with borrowed(...)``; all other modules
import them from there. A version outside of the tested bounds in pyproject.toml may lack one of them; the error then
names it and the bounds.
"""

import inspect
import pkgutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any, Final

from skiff_runtime.errors import ConfigError

Shape = Mapping[str, tuple[str, ...]]
"""The borrowed objects, by dotted name with a colon behind the module, and the names that each must have: members,
attributes that its constructor sets, or parameters."""

_PROJECT: Final = "skiff"


@contextmanager
def borrowed(package: str, shape: Shape, *, bounded_by: str | None = None) -> Iterator[None]:
    """Import internals of ``package`` in this block, and check their shape at its end.

    ``bounded_by``: the requirement that bounds the version of ``package``, if that is another package.

    Raises ``ConfigError`` with the package, its version and the supported versions if an internal is missing or
    has another shape. If the package itself is missing, the ``ModuleNotFoundError`` is raised unchanged.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        top = next(iter(shape)).replace(":", ".").partition(".")[0]
        if not (error.name or "").startswith(f"{top}."):
            raise  # the package itself, or one that it requires
        raise _mismatch(package, [str(error)], bounded_by) from error
    except (ImportError, AttributeError) as error:
        raise _mismatch(package, [str(error)], bounded_by) from error
    if missing := missing_internals(shape):
        raise _mismatch(package, missing, bounded_by)


def missing_internals(shape: Shape) -> list[str]:
    """Return the names of ``shape`` that the installed library lacks."""
    missing = []
    for name, expected in shape.items():
        try:
            found = _names(pkgutil.resolve_name(name))
        except (ImportError, AttributeError):
            missing.append(name)
        else:
            missing += [f"{name} {each}" for each in expected if each not in found]
    return missing


def _names(value: Any) -> set[str]:
    """Return the members of an object, the names in its constructor, and its parameters."""
    names = set(dir(value))
    if inspect.isclass(value) and (code := getattr(value.__init__, "__code__", None)):
        names.update(code.co_names)
    with suppress(TypeError, ValueError):  # no callable, or one compiled without a signature
        names.update(inspect.signature(value).parameters)
    return names


def _mismatch(package: str, missing: list[str], bounded_by: str | None) -> ConfigError:
    try:
        found = version(package)
    except PackageNotFoundError:
        found = "of unknown version"
    supported = _supported(bounded_by or package)
    return ConfigError(
        f"{package} {found} does not fit this release, which was tested with {supported}: it lacks {'; '.join(missing)}"
    )


def _supported(package: str) -> str:
    """Return the requirement on ``package`` in pyproject.toml, as the installation recorded it."""
    try:
        lines = requires(_PROJECT) or []
    except PackageNotFoundError:
        lines = []
    found = [line.partition(";")[0].strip() for line in lines if _name_of(line) == _normalized(package)]
    return " and ".join(dict.fromkeys(found)) or f"the {package} of pyproject.toml"


def _name_of(requirement: str) -> str:
    end = next(
        (at for at, letter in enumerate(requirement) if not (letter.isalnum() or letter in "-_.")), None
    )
    return _normalized(requirement[:end])


def _normalized(name: str) -> str:
    return name.replace("_", "-").replace(".", "-").lower()
