"""Shapes of well-known models: configurations without weights, for benchmarks and GPU tests, as ``shape://NAME``.

Each directory contains a ``config.json``, and the same tokenizer of single bytes, which is enough because benchmarks
send token ids. Weights are random (``--load-format dummy``).
"""

from pathlib import Path
from typing import Final

from skiff_runtime.errors import ConfigError

SCHEME: Final = "shape://"
DIRECTORY: Final = Path(__file__).parent


def names() -> list[str]:
    """Return the names of all shapes."""
    return sorted(path.parent.name for path in DIRECTORY.glob("*/config.json"))


def find(uri: str) -> Path:
    """Return the directory of ``shape://NAME``. Raises ConfigError if there is no such shape."""
    name = uri.removeprefix(SCHEME)
    if name not in names():
        raise ConfigError(f"--model {uri}: no such shape; known shapes are {', '.join(names())}")
    return DIRECTORY / name
