"""Safetensors files: every malformed header is refused by name, and every tensor is read from its offset."""

import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from skiff_runtime.errors import ModelError
from skiff_runtime.models.tensor_file import ELEMENT_BITS, TensorFile

PAIR = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
TOO_LARGE = 100_000_001


def write(path: Path, header: Any, data: bytes, *, length: int | None = None) -> Path:
    """Write a file of the format with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


@pytest.mark.parametrize(
    ("header", "size"),
    [
        pytest.param({"a": PAIR, "b": PAIR | {"data_offsets": [4, 12]}}, 12, id="overlap"),
        pytest.param({"a": PAIR, "b": PAIR | {"data_offsets": [12, 20]}}, 20, id="hole"),
        pytest.param({"a": PAIR | {"data_offsets": [8, 16]}}, 16, id="hole-at-the-start"),
        pytest.param({"a": PAIR}, 4, id="out-of-bounds"),
        pytest.param({"a": PAIR}, 12, id="bytes-of-no-tensor"),
        pytest.param({"a": PAIR | {"data_offsets": [8, 0]}}, 8, id="backwards"),
        pytest.param({"a": PAIR | {"data_offsets": [-8, 0]}}, 8, id="negative-offset"),
        pytest.param({"a": PAIR | {"dtype": "Q9"}}, 8, id="unknown-type"),
        pytest.param({"a": PAIR | {"shape": [3]}}, 8, id="shape-and-bytes-differ"),
        pytest.param({"a": PAIR | {"shape": [-2]}}, 8, id="negative-shape"),
        pytest.param({"a": PAIR | {"shape": [2**33, 2**33]}}, 8, id="shape-overflows"),
        pytest.param({"a": PAIR | {"shape": "2"}}, 8, id="shape-is-no-list"),
        pytest.param({"a": {"dtype": "F32"}}, 8, id="fields-missing"),
        pytest.param({"__metadata__": {"a": 1}, "b": PAIR}, 8, id="metadata-is-no-text"),
        pytest.param(
            f'{{"a": {json.dumps(PAIR)}, "a": {json.dumps(PAIR | {"data_offsets": [8, 16]})}}}'.encode(),
            16,
            id="name-twice",
        ),
        pytest.param([], 0, id="not-an-object"),
        pytest.param(b"\xff" * 20, 0, id="not-text"),
        pytest.param(b"{" * 1000, 0, id="not-json"),
    ],
)
def test_malformed_header_is_refused(tmp_path: Path, header: Any, size: int) -> None:
    file = write(tmp_path / "weights.safetensors", header, bytes(size))
    with pytest.raises(ModelError, match=r"weights\.safetensors is truncated or corrupt \(.+\); download"):
        TensorFile(file)


@pytest.mark.parametrize("length", [1 << 60, TOO_LARGE, 3])
def test_wrong_header_length_is_refused(tmp_path: Path, length: int) -> None:
    file = write(tmp_path / "weights.safetensors", {"a": PAIR}, bytes(8), length=length)
    with pytest.raises(ModelError, match=r"weights\.safetensors is truncated or corrupt"):
        TensorFile(file)


def test_oversized_header_is_refused_even_if_the_file_contains_it(tmp_path: Path) -> None:
    file = write(tmp_path / "weights.safetensors", b"", b"", length=TOO_LARGE)
    with file.open("ab") as stream:
        stream.truncate(TOO_LARGE + 100)
    with pytest.raises(ModelError, match="truncated or corrupt"):
        TensorFile(file)


@pytest.mark.parametrize("keep", [0, 4, 20, 0.5, 0.99])
def test_truncated_file_is_refused(tmp_path: Path, keep: float) -> None:
    file = tmp_path / "weights.safetensors"
    save_file({"a": np.ones(200, np.float32), "b": np.ones(100, np.float32)}, file)
    data = file.read_bytes()
    file.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    with pytest.raises(ModelError, match=r"weights\.safetensors is truncated or corrupt"):
        TensorFile(file)


def test_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"weights file .* is missing"):
        TensorFile(tmp_path / "absent.safetensors")
    with pytest.raises(ModelError, match=r"weights file .* is missing"):
        TensorFile(tmp_path)


def test_tensors_are_read_from_the_offsets_that_the_library_wrote(tmp_path: Path) -> None:
    drawn = np.random.default_rng(7)
    dtypes = (np.float64, np.float32, np.float16, np.int64, np.uint8, np.bool_)
    tensors = {
        f"t{index}": np.asarray(
            drawn.integers(0, 2, drawn.integers(0, 5, index % 4)), dtype=dtypes[index % 6]
        )
        for index in range(40)
    }
    save_file(tensors, tmp_path / "weights.safetensors", metadata={"format": "np"})
    file = TensorFile(tmp_path / "weights.safetensors")
    assert file.tensors.keys() == tensors.keys()
    for name, expected in tensors.items():
        stored = file.tensors[name]
        assert stored.shape == expected.shape
        taken = bytearray(expected.nbytes)
        file.read(memoryview(taken), stored.offset)
        assert bytes(taken) == expected.tobytes(), name
    file.close()


def test_element_sizes_cover_every_dtype_of_the_library(tmp_path: Path) -> None:
    file = write(tmp_path / "weights.safetensors", {"a": PAIR | {"dtype": "Q9"}}, bytes(8))
    with pytest.raises(SafetensorError) as caught:
        safe_open(file, framework="numpy")
    known = set(re.findall(r"`(\w+)`", str(caught.value).partition("expected one of")[2]))
    assert len(known) > 10
    assert known == set(ELEMENT_BITS)
    for dtype, bits in ELEMENT_BITS.items():
        entry = {"dtype": dtype, "shape": [8], "data_offsets": [0, bits]}
        tensors = TensorFile(
            write(file, {"a": entry, "b": PAIR | {"data_offsets": [bits, bits + 8]}}, bytes(bits + 8))
        ).tensors
        assert tensors["b"].offset - tensors["a"].offset == bits, dtype
