"""Sharded safetensors of a model directory, read lazily: a tensor's part is read when it is asked for."""

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import torch
from safetensors import SafetensorError, safe_open

from skiff_runtime.errors import ModelError
from skiff_runtime.layers.placement import Piece
from skiff_runtime.models.json_file import read_json

INDEX_FILE: Final = "model.safetensors.index.json"
SINGLE_FILE: Final = "model.safetensors"
_DTYPES: Final = ("F64", "F32", "F16", "BF16")


class Checkpoint:
    """The weights of one model directory. Every error is a ``ModelError`` that names file and tensor."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stack = ExitStack()
        self._shards: dict[str, _Shard] = {}
        self._files = self._index()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def check(self, pieces: Iterable[Piece]) -> None:
        """Refuse missing files and tensors and wrong shapes, reading nothing but headers."""
        for piece in pieces:
            self._shard(piece.name).check(piece)

    def read(self, piece: Piece) -> None:
        """Copy the piece's part of its tensor into its target."""
        self._shard(piece.name).read(piece)

    def _index(self) -> dict[str, str]:
        """The file of each tensor."""
        if (self._path / INDEX_FILE).exists():
            files = read_json(self._path / INDEX_FILE).get("weight_map")
            if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
                raise ModelError(f"{self._path / INDEX_FILE}: 'weight_map' must give the file of each tensor")
            for file in files.values():
                if Path(file).name != file:
                    raise ModelError(f"{self._path / INDEX_FILE}: {file!r} is not a plain file name")
            return files
        if (self._path / SINGLE_FILE).exists():
            return dict.fromkeys(self._open(SINGLE_FILE).names, SINGLE_FILE)
        raise ModelError(
            f"{self._path} holds no weights: neither {SINGLE_FILE} nor {INDEX_FILE} is there "
            "(other formats are not read); --load-format dummy runs without weights"
        )

    def _shard(self, name: str) -> "_Shard":
        file = self._files.get(name)
        if file is None:
            raise ModelError(
                f"{self._path}: no weights file holds the tensor {name!r}, which the model needs"
            )
        return self._shards.get(file) or self._open(file)

    def _open(self, file: str) -> "_Shard":
        path = self._path / file
        if not path.is_file():
            raise ModelError(f"weights file {path} is missing; download the model again")
        try:
            handle = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"weights file {path} is truncated or corrupt ({error}); download the model again"
            ) from None
        self._shards[file] = _Shard(path, handle)
        return self._shards[file]


class _Shard:
    """One open file."""

    def __init__(self, path: Path, handle: Any) -> None:
        self._path = path
        self._handle = handle
        self.names = frozenset(handle.keys())

    def check(self, piece: Piece) -> None:
        if piece.name not in self.names:
            raise ModelError(
                f"weights file {self._path} lacks the tensor {piece.name!r} that the index promises"
            )
        part = self._handle.get_slice(piece.name)
        shape = tuple(part.get_shape())
        if shape != piece.shape:
            raise ModelError(
                f"weights file {self._path}: tensor {piece.name!r} has shape {list(shape)}, but config.json "
                f"makes it {list(piece.shape)}"
            )
        if part.get_dtype() not in _DTYPES:
            raise ModelError(
                f"weights file {self._path}: tensor {piece.name!r} is of type {part.get_dtype()}; "
                f"supported are {', '.join(_DTYPES)}"
            )

    def read(self, piece: Piece) -> None:
        part = self._handle.get_slice(piece.name)
        rows = slice(piece.start, piece.stop)
        try:
            values: torch.Tensor = part[rows] if piece.dim == 0 else part[:, rows]
        except (SafetensorError, OSError) as error:
            raise ModelError(f"weights file {self._path}: cannot read {piece.name!r}: {error}") from None
        piece.target.copy_(values)
