"""A checkpoint of sharded safetensors files: finds each tensor's file, and checks that it is what the model needs."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from skiff_runtime.errors import ModelError
from skiff_runtime.kernels.fp8_tensors import E4M3
from skiff_runtime.layers.sharding import WeightShard
from skiff_runtime.models.checkpoint_files import INDEX_FILE, SINGLE_FILE, read_weight_map
from skiff_runtime.models.tensor_file import StoredTensor, TensorFile

FP8_DTYPE: Final = "F8_E4M3"
SCALE_DTYPES: Final = ("F32", "BF16", "F16")
_UNQUANTIZED_DTYPES: Final = ("F64", "F32", "F16", "BF16")
_DECODER_PREFIX: Final = "model."
"""Of the names of all tensors but the output head, unless the decoder was saved by itself."""
_SCALE_SUFFIX: Final = "_scale"
"""``weight_scale`` holds the scales of ``weight``, in checkpoints of compressed-tensors and of FBGEMM."""


@dataclass(frozen=True, slots=True)
class TensorSource:
    """The stored tensor that fills a weight shard, with its ``scales`` where the checkpoint is quantized."""

    file: TensorFile
    tensor: StoredTensor
    scales: "TensorSource | None" = None


class Checkpoint:
    """The weights of one model directory. Every error is a ``ModelError`` that names the file and the tensor.

    Where the model's configuration says that the checkpoint is ``quantized``, a tensor that should be quantized but is
    not is refused rather than quantized here.
    """

    def __init__(self, path: Path, *, quantized: bool = False) -> None:
        self._path = path
        self._quantized = quantized
        self._open_files: dict[str, TensorFile] = {}
        self._files = self._read_index()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._open_files.values():
            file.close()

    def locate(self, shards: Iterable[WeightShard]) -> list[tuple[WeightShard, TensorSource]]:
        """Find the source of every shard, except for optional ones that are absent, from the files' headers alone.

        Raises ``ModelError`` for missing files and tensors and for wrong shapes and dtypes.
        """
        if "embed_tokens.weight" in self._files:
            shards = map(_without_prefix, shards)
        return [
            (shard, self._locate(shard))
            for shard in shards
            if not shard.optional or any(name in self._files for name in (shard.name, *shard.aliases))
        ]

    def _locate(self, shard: WeightShard) -> TensorSource:
        name = next((each for each in (shard.name, *shard.aliases) if each in self._files), shard.name)
        file, tensor = self._find_matrix(shard, name)
        if shard.converter is not None:
            _require_dtype(file, name, tensor, shard.converter.dtypes)
            return TensorSource(file, tensor)
        if shard.target.dtype == E4M3 and shard.scales is None:
            _require_dtype(file, name, tensor, (FP8_DTYPE,))
            return TensorSource(file, tensor)
        if shard.scales is not None and (self._quantized or tensor.dtype == FP8_DTYPE):
            _require_dtype(file, shard.name, tensor, (FP8_DTYPE,))
            return TensorSource(file, tensor, self._locate_scales(shard))
        _require_dtype(file, shard.name, tensor, _UNQUANTIZED_DTYPES)
        return TensorSource(file, tensor)

    def _find_matrix(self, shard: WeightShard, name: str) -> tuple[TensorFile, StoredTensor]:
        """Find the shard's tensor, by itself as ``name`` or as a part of the tensor that stacks it with others."""
        stacked = shard.stacked
        if stacked is None or name in self._files or stacked.name not in self._files:
            return self._find(name, *((shard.shape,) if shard.shape else ((), (1,))))
        file, tensor = self._find(stacked.name, stacked.shape)
        row_bytes = tensor.row_bytes // stacked.shape[1]
        return file, StoredTensor(tensor.dtype, shard.shape, tensor.offset + stacked.first_row * row_bytes)

    def _locate_scales(self, shard: WeightShard) -> TensorSource:
        name = shard.name + _SCALE_SUFFIX
        file, tensor = self._find(name, (shard.shape[0], 1), (shard.shape[0],))
        _require_dtype(file, name, tensor, SCALE_DTYPES)
        return TensorSource(file, tensor)

    def _find(self, name: str, *shapes: tuple[int, ...]) -> tuple[TensorFile, StoredTensor]:
        """Find the tensor ``name``, whose shape must be one of ``shapes``."""
        file = self._file_of(name)
        tensor = file.tensors.get(name)
        if tensor is None:
            raise ModelError(f"weights file {file.path} lacks the tensor {name!r} that the index lists")
        if tensor.shape not in shapes:
            raise ModelError(
                f"weights file {file.path}: tensor {name!r} has shape {list(tensor.shape)}, but config.json "
                f"implies {list(shapes[0])}"
            )
        return file, tensor

    def _read_index(self) -> dict[str, str]:
        """Return the file name of each tensor."""
        if (self._path / INDEX_FILE).exists():
            return read_weight_map(self._path)
        if (self._path / SINGLE_FILE).exists():
            return dict.fromkeys(self._open(SINGLE_FILE).tensors, SINGLE_FILE)
        raise ModelError(
            f"{self._path} contains no weights: neither {SINGLE_FILE} nor {INDEX_FILE} exists "
            "(other formats are not supported); --load-format dummy runs without weights"
        )

    def _file_of(self, name: str) -> TensorFile:
        file = self._files.get(name)
        if file is None:
            raise ModelError(
                f"{self._path}: no weights file contains the tensor {name!r}, which the model needs"
            )
        return self._open_files.get(file) or self._open(file)

    def _open(self, file: str) -> TensorFile:
        self._open_files[file] = TensorFile(self._path / file)
        return self._open_files[file]


def _without_prefix(shard: WeightShard) -> WeightShard:
    """Return a shard under the names that its tensor has in a decoder that was saved by itself."""
    stacked = shard.stacked
    return replace(
        shard,
        name=shard.name.removeprefix(_DECODER_PREFIX),
        aliases=tuple(alias.removeprefix(_DECODER_PREFIX) for alias in shard.aliases),
        stacked=stacked and replace(stacked, name=stacked.name.removeprefix(_DECODER_PREFIX)),
    )


def _require_dtype(file: TensorFile, name: str, tensor: StoredTensor, dtypes: tuple[str, ...]) -> None:
    if tensor.dtype not in dtypes:
        raise ModelError(
            f"weights file {file.path}: tensor {name!r} is of type {tensor.dtype}; "
            f"supported are {', '.join(dtypes)}"
        )
