"""Sharded safetensors of a model directory: which file holds each tensor, and whether it is what the model needs."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from skiff_runtime.errors import ModelError
from skiff_runtime.json_file import read_json
from skiff_runtime.layers.sharding import Piece
from skiff_runtime.models.tensor_file import StoredTensor, TensorFile

INDEX_FILE: Final = "model.safetensors.index.json"
SINGLE_FILE: Final = "model.safetensors"
FP8_DTYPE: Final = "F8_E4M3"
SCALE_DTYPES: Final = ("F32", "BF16", "F16")
_KINDS: Final = ("F64", "F32", "F16", "BF16")
_SCALE: Final = "_scale"
"""``weight_scale`` holds the scales of ``weight``: compressed-tensors and FBGEMM name them so."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a piece's numbers come from; ``scales`` where the checkpoint has them quantized already."""

    file: TensorFile
    tensor: StoredTensor
    scales: "Source | None" = None


class Checkpoint:
    """The weights of one model directory. Every error is a ``ModelError`` that names file and tensor.

    Where its configuration says that it is ``quantized``, what is not, but should be, is refused rather than rounded.
    """

    def __init__(self, path: Path, *, quantized: bool = False) -> None:
        self._path = path
        self._quantized = quantized
        self._open_files: dict[str, TensorFile] = {}
        self._files = self._index()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._open_files.values():
            file.close()

    def sources(self, pieces: Iterable[Piece]) -> list[tuple[Piece, Source]]:
        """Find all of them; missing files and tensors and wrong shapes are refused, from headers alone."""
        return [(piece, self._source(piece)) for piece in pieces]

    def _source(self, piece: Piece) -> Source:
        file, tensor = self._find(piece.name, piece.shape)
        if piece.scales is not None and (self._quantized or tensor.kind == FP8_DTYPE):
            _require_kind(file, piece.name, tensor, (FP8_DTYPE,))
            return Source(file, tensor, self._scales(piece))
        _require_kind(file, piece.name, tensor, _KINDS)
        return Source(file, tensor)

    def _scales(self, piece: Piece) -> Source:
        name = piece.name + _SCALE
        file, tensor = self._find(name, (piece.shape[0], 1), (piece.shape[0],))
        _require_kind(file, name, tensor, SCALE_DTYPES)
        return Source(file, tensor)

    def _find(self, name: str, *shapes: tuple[int, ...]) -> tuple[TensorFile, StoredTensor]:
        """The tensor ``name``, whose shape must be one of ``shapes``."""
        file = self._file_of(name)
        tensor = file.tensors.get(name)
        if tensor is None:
            raise ModelError(f"weights file {file.path} lacks the tensor {name!r} that the index promises")
        if tensor.shape not in shapes:
            raise ModelError(
                f"weights file {file.path}: tensor {name!r} has shape {list(tensor.shape)}, but config.json "
                f"makes it {list(shapes[0])}"
            )
        return file, tensor

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
            return dict.fromkeys(self._open(SINGLE_FILE).tensors, SINGLE_FILE)
        raise ModelError(
            f"{self._path} holds no weights: neither {SINGLE_FILE} nor {INDEX_FILE} is there "
            "(other formats are not read); --load-format dummy runs without weights"
        )

    def _file_of(self, name: str) -> TensorFile:
        file = self._files.get(name)
        if file is None:
            raise ModelError(
                f"{self._path}: no weights file holds the tensor {name!r}, which the model needs"
            )
        return self._open_files.get(file) or self._open(file)

    def _open(self, file: str) -> TensorFile:
        self._open_files[file] = TensorFile(self._path / file)
        return self._open_files[file]


def _require_kind(file: TensorFile, name: str, tensor: StoredTensor, kinds: tuple[str, ...]) -> None:
    if tensor.kind not in kinds:
        raise ModelError(
            f"weights file {file.path}: tensor {name!r} is of type {tensor.kind}; "
            f"supported are {', '.join(kinds)}"
        )
