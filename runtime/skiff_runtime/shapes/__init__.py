"""Shapes of well-known models: configurations without weights, which ``shape://NAME`` gives to benchmarks and GPU tests.

Data, and the way to it. Each directory holds a ``config.json`` and the same tokenizer of single bytes, for
benchmarks prompt with token ids; weights are drawn at random (``--load-format dummy``).
"""

from pathlib import Path
from typing import Final

from skiff_runtime.errors import ConfigError

SCHEME: Final = "shape://"
DIRECTORY: Final = Path(__file__).parent


def names() -> list[str]:
    """Every shape there is."""
    return sorted(path.parent.name for path in DIRECTORY.glob("*/config.json"))


def find(uri: str) -> Path:
    """The directory of ``shape://NAME``. Raises ConfigError."""
    name = uri.removeprefix(SCHEME)
    if name not in names():
        raise ConfigError(f"--model {uri}: there is no such shape; there are {', '.join(names())}")
    return DIRECTORY / name
