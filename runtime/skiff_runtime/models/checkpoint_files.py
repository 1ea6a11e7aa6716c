"""The files of a checkpoint: where its weights are, before anything of them is read; imports no torch."""

from pathlib import Path
from typing import Final

from skiff_runtime.errors import ModelError
from skiff_runtime.gguf.header import is_gguf
from skiff_runtime.json_file import read_json

INDEX_FILE: Final = "model.safetensors.index.json"
SINGLE_FILE: Final = "model.safetensors"


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
