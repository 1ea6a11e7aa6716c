"""The files of a checkpoint: where its weights are, before anything of them is read; imports no torch."""

import json
from pathlib import Path
from typing import Final

from skiff_runtime.errors import ModelError
from skiff_runtime.gguf.header import is_gguf
from skiff_runtime.json_file import read_json

INDEX_FILE: Final = "model.safetensors.index.json"
SINGLE_FILE: Final = "model.safetensors"
MAX_HEADER_BYTES: Final = 100_000_000
"""The safetensors library's own limit."""


def list_weight_files(path: Path) -> list[Path]:
    """Return the files that contain weights, by name: a GGUF file itself, or those of a directory; none if it has none.

    Raises ``ModelError`` if the directory's index is unreadable or names a file outside of the directory.
    """
    if is_gguf(path) and path.is_file():
        return [path]
    if (path / INDEX_FILE).exists():
        return [path / name for name in sorted(set(read_weight_map(path).values()))]
    return [path / SINGLE_FILE] if (path / SINGLE_FILE).exists() else []


def read_weight_map(path: Path) -> dict[str, str]:
    """Return the file name of each tensor, by the index of a directory."""
    files = read_json(path / INDEX_FILE).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise ModelError(f"{path / INDEX_FILE}: 'weight_map' must give the file of each tensor")
    for file in files.values():
        if Path(file).name != file:  # a path could lead out of the model directory
            raise ModelError(f"{path / INDEX_FILE}: {file!r} is not a plain file name")
    return files


def read_tensor_names(path: Path) -> frozenset[str]:
    """Return the names of all tensors of a directory, by its index or by the header of its only file; none without weights.

    Raises ``ModelError`` if either is malformed.
    """
    if (path / INDEX_FILE).exists():
        return frozenset(read_weight_map(path))
    file = path / SINGLE_FILE
    if not file.exists():
        return frozenset()
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > MAX_HEADER_BYTES:
            raise ModelError(f"weights file {file} has a header of {length} bytes; it is damaged")
        try:
            header = json.loads(stream.read(length))
        except (ValueError, RecursionError):
            raise ModelError(f"weights file {file} has a header that is not JSON; it is damaged") from None
    return frozenset(header) if isinstance(header, dict) else frozenset()
