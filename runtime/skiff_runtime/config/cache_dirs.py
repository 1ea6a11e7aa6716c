"""Directories of Skiff's own cache: compiled kernels and converted tokenizers."""

import os
from pathlib import Path


def default_cache_dir() -> Path:
    """Return the root of Skiff's cache, by the XDG base directory specification."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "skiff"


def tokenizer_cache_dirs(download_dir: str | Path | None) -> list[Path]:
    """Return the directories of converted tokenizers, in the order of lookup: beside the models, then Skiff's cache."""
    own = default_cache_dir()
    return [Path(download_dir), own] if download_dir else [own]
