"""The weights in a GGUF file: finds each tensor, and dequantizes rows of it by the ``gguf`` package.

A row of a quantized tensor is a sequence of blocks, so a rank reads the rows of its shard, and of a shard by columns it
dequantizes only the blocks that contain one of its columns.
"""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import numpy as np
import torch
from numpy.typing import NDArray

from skiff_runtime.errors import ModelError
from skiff_runtime.gguf.header import GgufTensor, read_header
from skiff_runtime.layers.sharding import WeightShard
from skiff_runtime.models.gguf_config import ROPE_FACTORS

DEQUANTIZED_BYTES: Final = 4 << 20
"""Float32 results that a thread dequantizes at a time: the package allocates several temporaries of this size."""
_OUTSIDE_OF_LAYERS: Final = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_IN_LAYERS: Final = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.(.+)")
_PERMUTED: Final = re.compile(r"blk\.\d+\.attn_[qk]\.(?:weight|bias)")
_PERMUTING_ARCHITECTURE: Final = "llama"


@dataclass(frozen=True, slots=True)
class GgufSource:
    """The tensor of a GGUF file that fills a weight shard.

    ``head_dim`` is that of a tensor whose rows llama.cpp has permuted inside of each head, else 1.
    """

    descriptor: int
    path: Path
    name: str
    tensor: GgufTensor
    head_dim: int = 1

    @property
    def rows_at_a_time(self) -> int:
        """Rows that one thread should dequantize at a time: of whole heads, of about ``DEQUANTIZED_BYTES``."""
        row_elements = max(1, self.tensor.shape[-1] if len(self.tensor.shape) > 1 else 1)
        return max(1, DEQUANTIZED_BYTES // (4 * row_elements * self.head_dim)) * self.head_dim

    def read_rows(self, first: int, count: int, columns: tuple[int, int] | None = None) -> torch.Tensor:
        """Dequantize ``count`` rows from ``first``, float32 [count, columns]; without ``columns``, of the tensor's shape.

        ``columns``: the first column and the one after the last, of a tensor of two dimensions. Safe in any thread.
        """
        tensor = self.tensor
        raw = self._read(tensor.offset + first * tensor.row_bytes, count * tensor.row_bytes)
        rows = raw.reshape(count, tensor.row_bytes)
        block = tensor.type.block_elements
        skipped = 0
        if columns is not None:
            first_block, end_block = columns[0] // block, -(-columns[1] // block)
            size = tensor.type.block_bytes
            rows = np.ascontiguousarray(rows[:, first_block * size : end_block * size])
            skipped = first_block * block
        values = torch.from_numpy(_dequantize(rows, tensor.type.name))
        if columns is not None:
            values = values[:, columns[0] - skipped : columns[1] - skipped]
        if self.head_dim > 1:
            values = _undo_permutation(values, self.head_dim)
        return values if len(tensor.shape) > 1 else values.flatten()

    def _read(self, offset: int, count: int) -> NDArray[np.uint8]:
        target = np.empty(count, dtype=np.uint8)
        view, done = target.data, 0
        while done < count:
            try:
                read = os.preadv(self.descriptor, [view[done:]], offset + done)
            except OSError as error:
                raise ModelError(f"cannot read GGUF file {self.path}: {error.strerror}") from None
            if read == 0:
                raise ModelError(
                    f"GGUF file {self.path} ends inside of tensor {self.name!r}; download the model again"
                )
            done += read
        return target


class GgufCheckpoint:
    """The weights of one GGUF file. Every error is a ``ModelError`` that names the file and the tensor."""

    def __init__(self, path: Path, *, head_dim: int) -> None:
        self._path = path
        self._head_dim = head_dim
        header = read_header(path)
        self._tensors = header.tensors
        self._is_permuted = header.metadata.get("general.architecture") == _PERMUTING_ARCHITECTURE
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ModelError(f"cannot read GGUF file {path}: {error.strerror}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def locate(self, shards: Iterable[WeightShard]) -> list[tuple[WeightShard, GgufSource]]:
        """Find the source of every shard, from the header alone.

        Raises ``ModelError`` for missing tensors, for wrong shapes, and for tensors that no shard uses: they belong to
        a computation that the architecture does not have.
        """
        found = [(shard, self._locate(shard)) for shard in shards]
        used = {source.name for _, source in found} | {ROPE_FACTORS}
        unused = next((name for name in self._tensors if name not in used), None)
        if unused is not None:
            raise ModelError(f"GGUF file {self._path}: tensor {unused!r} is not used by this architecture")
        return found

    def _locate(self, shard: WeightShard) -> GgufSource:
        name = gguf_name(shard.name)
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ModelError(
                f"GGUF file {self._path} does not contain the tensor {name!r}, which the model needs"
            )
        if tensor.shape != shard.shape:
            raise ModelError(
                f"GGUF file {self._path}: tensor {name!r} has shape {list(tensor.shape)}, but the metadata implies "
                f"{list(shard.shape)}"
            )
        permuted = self._is_permuted and _PERMUTED.fullmatch(name) is not None
        return GgufSource(self._descriptor, self._path, name, tensor, self._head_dim if permuted else 1)


def gguf_name(name: str) -> str:
    """Return GGUF's name of a tensor, from its name in a Hugging Face checkpoint."""
    module, _, kind = name.rpartition(".")
    layer = _LAYER.fullmatch(module)
    if layer is None:
        return f"{_OUTSIDE_OF_LAYERS[module]}.{kind}"
    return f"blk.{layer[1]}.{_IN_LAYERS[layer[2]]}.{kind}"


def _dequantize(rows: NDArray[np.uint8], type_name: str) -> NDArray[np.float32]:
    """Dequantize rows of blocks, uint8 [count, bytes] -> float32 [count, elements]."""
    from gguf import GGMLQuantizationType, dequantize  # imported only where a rank reads such a file

    with np.errstate(
        all="ignore"
    ):  # a corrupt scale may be anything; the engine reports logits that are not finite
        # The package loops over groups of 16 rows in Python, so it gets all of them as one.
        values: NDArray[np.float32] = dequantize(rows.reshape(1, -1), GGMLQuantizationType[type_name])
    return values.reshape(len(rows), -1)


def _undo_permutation(values: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Undo llama.cpp's order of rows inside of each head, [heads * head_dim, columns].

    It interleaves the two halves of a head, because its rotary embedding rotates neighbouring elements; ours, as
    Hugging Face's, rotates element i with element i + head_dim / 2.
    """
    heads = values.reshape(-1, head_dim // 2, 2, *values.shape[1:])
    return heads.transpose(1, 2).reshape(values.shape)
