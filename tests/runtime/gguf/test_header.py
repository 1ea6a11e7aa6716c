"""GGUF headers: what the format's own writer wrote is found, and everything malformed is refused by name."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter
from gguf_bytes import ARRAY, BOOL, F32, Q8_0, STRING, UINT32, GgufBytes, Tensor, text
from hypothesis import given
from hypothesis import strategies as st

from skiff_runtime.errors import ModelError
from skiff_runtime.gguf import header
from skiff_runtime.gguf.header import GgufHeader, UnreadArray, read_header

PAIR = Tensor("pair", [2])
GOOD = GgufBytes(
    [
        ("general.architecture", STRING, "llama"),
        ("llama.block_count", UINT32, 2),
        ("flag", BOOL, 1),
        ("words", ARRAY, (STRING, ["a", "bc", ""])),
        ("numbers", ARRAY, (UINT32, [7, 8])),
    ],
    [PAIR, Tensor("blocks", [64, 3], Q8_0, 32)],
    bytes(32 + 3 * 68),
)


def write(directory: Path, content: GgufBytes | bytes) -> Path:
    path = directory / "model.gguf"
    path.write_bytes(content if isinstance(content, bytes) else content.build())
    return path


def read(directory: Path, content: GgufBytes | bytes, *arrays: str) -> GgufHeader:
    return read_header(write(directory, content), arrays)


def test_metadata_and_tensors_are_read(tmp_path: Path) -> None:
    found = read(tmp_path, GOOD, "words", "numbers")
    assert found.metadata == {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "flag": True,
        "words": ["a", "bc", ""],
        "numbers": [7, 8],
    }
    assert found.tensors["pair"].shape == (2,) and found.tensors["pair"].row_bytes == 4
    blocks = found.tensors["blocks"]
    assert (blocks.shape, blocks.row_bytes, blocks.nbytes, blocks.type.name) == ((3, 64), 68, 204, "Q8_0")
    assert blocks.offset - found.tensors["pair"].offset == 32


def test_arrays_are_only_counted_unless_asked_for(tmp_path: Path) -> None:
    metadata = read(tmp_path, GOOD).metadata
    assert metadata["words"] == UnreadArray(3) and metadata["numbers"] == UnreadArray(2)
    assert metadata["flag"] is True


def test_digest_is_that_of_the_header_and_not_of_the_weights(tmp_path: Path) -> None:
    content = GOOD.build()
    same = read(tmp_path, content[:-1] + b"x").digest
    assert read(tmp_path, content).digest == same
    assert (
        read(
            tmp_path,
            content.replace(b"\x01\x00\x00\x00\x00\x00\x00\x00a", b"\x01\x00\x00\x00\x00\x00\x00\x00b"),
        ).digest
        != same
    )


def test_files_of_the_packages_writer_are_located_as_by_its_reader(tmp_path: Path) -> None:
    drawn = np.random.default_rng(3)
    path = tmp_path / "model.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_custom_alignment(64)
    writer.add_array("tokens", [f"token {number} ü" for number in range(100_000)])
    writer.add_array("scores", [0.5] * 5000)
    for number in range(40):
        shape = drawn.integers(1, 9, 1 + number % 4)
        writer.add_tensor(
            f"t{number}", drawn.random(shape, np.float32).astype((np.float32, np.float16)[number % 2])
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = read_header(path, ["tokens"])
    expected = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    assert found.tensors.keys() == expected.keys()
    for name, tensor in found.tensors.items():
        assert tensor.offset == expected[name].data_offset and tensor.nbytes == expected[name].n_bytes
        assert tensor.shape == tuple(int(size) for size in expected[name].shape[::-1])
        assert tensor.type.name == expected[name].tensor_type.name
    assert found.metadata["tokens"][99_999] == "token 99999 ü"


@pytest.mark.parametrize("size", range(0, len(GOOD.build()), 5))
def test_truncated_file_is_refused(tmp_path: Path, size: int) -> None:
    with pytest.raises(ModelError, match=r"model\.gguf is (truncated or corrupt|not a GGUF file)"):
        read(tmp_path, GOOD.build()[:size])


def metadata(*entries: tuple[str, int, Any]) -> GgufBytes:
    return GgufBytes(list(entries))


def tensors(*entries: Tensor, data: int = 64) -> GgufBytes:
    return GgufBytes([], list(entries), bytes(data))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (GgufBytes(magic=b"GGML"), "is not a GGUF file"),
        (GgufBytes(version=1), "of version 1, which is not supported"),
        (GgufBytes(version=3 << 24), "is big-endian"),
        (GgufBytes(num_tensors=1 << 63), "9223372036854775808 tensors; at most"),
        (GgufBytes(num_metadata=1 << 40), "1099511627776 metadata keys; at most"),
        (GgufBytes(num_tensors=100, alignment=1), "ends inside of a tensor's name"),
        (GgufBytes(num_metadata=100, alignment=1), "ends inside of a metadata key"),
        (metadata(("a", 99, b"")), "the value of 'a' is of the unknown type 99"),
        (metadata(("a", ARRAY, (ARRAY, 1, b""))), "the value of 'a' is of the unknown type 9"),
        (metadata(("a", ARRAY, (UINT32, 1 << 62, b""))), "4611686018427387904 elements of 'a'; at most"),
        (metadata(("a", ARRAY, (UINT32, 1 << 20, b""))), "ends inside of the value of 'a'"),
        (metadata(("a", ARRAY, (STRING, 1 << 20, b""))), "ends inside of the value of 'a'"),
        (
            metadata(("a", ARRAY, (STRING, 2, text("x") + struct.pack("<Q", 1 << 63)))),
            "ends inside of the value of 'a'",
        ),
        (GgufBytes([("a", 12, b"")], alignment=1), "ends inside of the value of 'a'"),
        (metadata(("a", BOOL, 2)), "the value of 'a' is neither true nor false"),
        (metadata(("a", STRING, b"\xff")), "the value of 'a' is not valid UTF-8"),
        (metadata(("k" * 2000, UINT32, 1)), "a metadata key has 2000 bytes; at most"),
        (metadata(("a", UINT32, 1), ("a", UINT32, 1)), "the key 'a' occurs twice"),
        (metadata(("general.alignment", UINT32, 48)), "'general.alignment' must be a power of two, not 48"),
        (metadata(("general.alignment", UINT32, 0)), "'general.alignment' must be a power of two, not 0"),
        (metadata(("general.alignment", UINT32, 1 << 31)), "'general.alignment' must be a power of two"),
        (metadata(("general.alignment", STRING, "32")), "'general.alignment' must be a power of two"),
        (tensors(Tensor("w", [])), "tensor 'w' has no elements"),
        (tensors(Tensor("w", [4, 0])), "tensor 'w' has no elements"),
        (tensors(Tensor("w", [1] * 5)), "5 dimensions of tensor 'w'; at most 4"),
        (tensors(Tensor("w", [17])), "tensor 'w' ends at byte"),
        (tensors(Tensor("w", [1 << 63, 1 << 63])), "tensor 'w' ends at byte"),
        (tensors(Tensor("w", [2], offset=1 << 63)), "tensor 'w' ends at byte"),
        (tensors(Tensor("w", [2], offset=8)), "tensor 'w' is not aligned to 32 bytes"),
        (
            tensors(Tensor("w", [48, 1], Q8_0)),
            "rows of tensor 'w' have 48 elements, no multiple of Q8_0's block of 32",
        ),
        (tensors(Tensor("w", [32], Q8_0)), "tensor 'w' has one dimension but is of type Q8_0"),
        (tensors(Tensor("w", [2]), Tensor("w", [2], offset=32)), "tensor 'w' occurs twice"),
        (tensors(Tensor("v", [16]), Tensor("w", [2], offset=32)), "tensor 'w' overlaps the one before it"),
    ],
)
def test_malformed_header_is_refused(tmp_path: Path, content: GgufBytes, problem: str) -> None:
    with pytest.raises(ModelError) as caught:
        read(tmp_path, content)
    assert problem in str(caught.value) and "model.gguf" in str(caught.value)


def test_unknown_tensor_type_is_refused_with_the_supported_ones(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"'w' is of GGML type 4, which is not supported; supported are F32, .*, Q4_K"
    ):
        read(tmp_path, tensors(Tensor("w", [32], 4)))


def test_header_longer_than_the_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header, "MAX_HEADER_BYTES", 100)
    with pytest.raises(ModelError, match="header is longer than"):
        read(tmp_path, GOOD)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot read GGUF file .*absent\.gguf: No such file"):
        read_header(tmp_path / "absent.gguf")


@given(
    st.lists(st.tuples(st.integers(0, len(GOOD.build()) - 1), st.integers(0, 255)), max_size=6),
    st.integers(0, 400),
)
def test_no_content_does_more_harm_than_being_refused(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]], size: int
) -> None:
    content = bytearray(GOOD.build())
    for at, byte in changes:
        content[at] = byte
    directory = tmp_path_factory.getbasetemp()
    try:
        found = read(directory, bytes(content[:size]), "words", "numbers")
    except ModelError as error:
        assert "model.gguf" in str(error)
    else:
        assert all(tensor.offset + tensor.nbytes <= size for tensor in found.tensors.values())


def test_tensor_may_end_with_the_file(tmp_path: Path) -> None:
    small = tensors(Tensor("w", [2], F32), data=8)
    assert read(tmp_path, small).tensors["w"].nbytes == 8
    with pytest.raises(ModelError, match="tensor 'w' ends at byte"):
        read(tmp_path, small.build()[:-1])
