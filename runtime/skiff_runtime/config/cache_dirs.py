"""Directories in which Skiff keeps what it makes itself: compiled kernels, converted tokenizers."""

import os
from pathlib import Path


def default_cache_dir() -> Path:
    """Return where Skiff keeps what it makes itself: compiled kernels, converted tokenizers."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "skiff"


def tokenizer_cache_dirs(cache_dir: str | Path | None) -> list[Path]:
    """Return where converted tokenizers are looked for and kept: beside the models, else in Skiff's own cache."""
    own = default_cache_dir()
    return [Path(cache_dir), own] if cache_dir else [own]
