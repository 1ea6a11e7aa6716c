"""Golden vectors of the packings of 4-bit weights: words written from the formats' definitions, not by our own writer.

The definitions, with nibble n of a word being its bits 4n to 4n + 3:

- AutoAWQ (gemm): ``qweight`` [inputs, outputs / 8] and ``qzeros`` [groups, outputs / 8]; nibble n of a word holds the
  output 0, 2, 4, 6, 1, 3, 5, 7 of its eight. ``scales`` [groups, outputs].
- GPTQ: ``qweight`` [inputs / 8, outputs], nibble n holds the input n of eight; ``qzeros`` [groups, outputs / 8], nibble
  n holds the output n of eight, less 1 modulo 16 in the first version of the format. ``scales`` [groups, outputs].
- compressed-tensors (pack-quantized): ``weight_packed`` [outputs, inputs / 8], nibble n holds the input n of eight;
  ``weight_zero_point`` [outputs / 8, groups], nibble n holds the output n of eight. Both are signed numbers plus 8.
  ``weight_scale`` [outputs, groups].
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from skiff_runtime.errors import ModelError
from skiff_runtime.kernels.int4_tensors import dequantize_int4
from skiff_runtime.layers.linear_weight import Int4LinearWeight, MatrixPart
from skiff_runtime.layers.sharding import LayerContext
from skiff_runtime.layers.weight_format import Int4Format

OUTPUTS, INPUTS, GROUP_SIZE = 16, 64, 32
GROUPS = INPUTS // GROUP_SIZE
Table = list[list[int]]

INTEGERS: Table = [[(7 * output + 5 * i + i // 8) % 16 for i in range(INPUTS)] for output in range(OUTPUTS)]
ZEROS: Table = [[(3 * output + 11 * group) % 16 for group in range(GROUPS)] for output in range(OUTPUTS)]
SCALES: list[list[float]] = [
    [2.0 ** -(output % 5 + 3 * group) for group in range(GROUPS)] for output in range(OUTPUTS)
]
"""Powers of two, so that every product is exact."""


def word(n0: int, n1: int, n2: int, n3: int, n4: int, n5: int, n6: int, n7: int) -> int:
    """Return the int32 with these nibbles, from the lowest on."""
    bits = n0 | n1 << 4 | n2 << 8 | n3 << 12 | n4 << 16 | n5 << 20 | n6 << 24 | n7 << 28
    return bits - (1 << 32) if bits >> 31 else bits


def transpose(table: Sequence[Sequence[Any]]) -> list[list[Any]]:
    return [list(column) for column in zip(*table, strict=True)]


def awq_words(rows: Table) -> Table:
    """Pack each eight of a row."""
    return [
        [
            word(v[at], v[at + 2], v[at + 4], v[at + 6], v[at + 1], v[at + 3], v[at + 5], v[at + 7])
            for at in range(0, len(v), 8)
        ]
        for v in rows
    ]


def plain_words(rows: Table) -> Table:
    """Pack each eight of a row."""
    return [
        [
            word(v[at], v[at + 1], v[at + 2], v[at + 3], v[at + 4], v[at + 5], v[at + 6], v[at + 7])
            for at in range(0, len(v), 8)
        ]
        for v in rows
    ]


def store_awq(integers: Table, zeros: Table, scales: list[list[float]]) -> dict[str, Any]:
    return {
        "qweight": awq_words(transpose(integers)),
        "qzeros": awq_words(transpose(zeros)),
        "scales": transpose(scales),
    }


def store_gptq(integers: Table, zeros: Table, scales: list[list[float]]) -> dict[str, Any]:
    """GPTQ's second version."""
    return {
        "qweight": transpose(plain_words(integers)),
        "qzeros": plain_words(transpose(zeros)),
        "scales": transpose(scales),
    }


def store_gptq_v1(integers: Table, zeros: Table, scales: list[list[float]]) -> dict[str, Any]:
    less = [[15 if zero == 0 else zero - 1 for zero in row] for row in zeros]
    return store_gptq(integers, less, scales)


def store_compressed(integers: Table, zeros: Table, scales: list[list[float]]) -> dict[str, Any]:
    return {
        "weight_packed": plain_words(integers),
        "weight_shape": [OUTPUTS, INPUTS],
        "weight_zero_point": transpose(plain_words(transpose(zeros))),
        "weight_scale": scales,
    }


CASES: list[tuple[Int4Format, Callable[[Table, Table, list[list[float]]], dict[str, Any]]]] = [
    (Int4Format("awq", GROUP_SIZE, zero_points=True), store_awq),
    (Int4Format("gptq", GROUP_SIZE, zero_points=True, zero_offset=1), store_gptq_v1),
    (Int4Format("gptq", GROUP_SIZE, zero_points=True), store_gptq),
    (Int4Format("compressed-tensors", GROUP_SIZE, zero_points=True), store_compressed),
]
PACKING = pytest.mark.parametrize(
    ("weight_format", "store"), CASES, ids=["awq", "gptq", "gptq-v2", "compressed-tensors"]
)


def load(weight_format: Int4Format, stored: dict[str, Any]) -> list[list[float]]:
    """Let the converters read the tensors of a module; return the weights [outputs, inputs]."""
    context = LayerContext(torch.float32, torch.device("cpu"))
    weight = Int4LinearWeight(OUTPUTS, INPUTS, context, weight_format, 1)
    shards = list(weight.weight_shards([MatrixPart("proj", (OUTPUTS, INPUTS), 0, 0, OUTPUTS, 0)]))
    for shard in sorted(shards, key=lambda each: each.converter is None or not each.converter.precedes):
        end = shard.name.removeprefix("proj.")
        if end not in stored and shard.optional:
            continue
        whole = end.endswith(("scale", "scales"))
        values = torch.tensor(stored.pop(end), dtype=torch.float32 if whole else torch.int32)
        assert tuple(values.shape) == shard.shape, end
        assert shard.converter is not None
        shard.converter.store(values, 0)
    assert not stored
    weights: list[list[float]] = dequantize_int4(weight.matrix, torch.float32).tolist()
    return weights


def dequantized(group_of: Callable[[int], int]) -> list[list[float]]:
    """Return (integer - zero point) * scale for each output and input, in plain arithmetic."""
    return [
        [
            (INTEGERS[output][i] - ZEROS[output][group_of(i)]) * SCALES[output][group_of(i)]
            for i in range(INPUTS)
        ]
        for output in range(OUTPUTS)
    ]


def test_words_are_those_that_the_definitions_give() -> None:
    """Checked by hand: of the numbers 0 to 7 the lowest four bits are the rightmost hexadecimal digit."""
    numbers = [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert awq_words(numbers) == [[0x75316420]]
    assert plain_words(numbers) == [[0x76543210]]
    eights = [[8] * 8]
    assert plain_words(eights) == [[0x88888888 - (1 << 32)]]
    # AutoGPTQ's zero points of every symmetric checkpoint.
    assert store_gptq_v1(eights, [[8]] * 8, [[1.0]] * 8)["qzeros"] == [[0x77777777]]


@PACKING
def test_golden_words_are_dequantized(
    weight_format: Int4Format, store: Callable[[Table, Table, list[list[float]]], dict[str, Any]]
) -> None:
    found = load(weight_format, store(INTEGERS, ZEROS, SCALES))
    assert found == dequantized(lambda i: i // GROUP_SIZE)


@PACKING
@pytest.mark.parametrize(("output", "i"), [(0, 0), (1, 0), (0, 1), (6, 3), (9, 33), (15, 63)])
def test_one_number_is_found_at_its_place(
    weight_format: Int4Format,
    store: Callable[[Table, Table, list[list[float]]], dict[str, Any]],
    output: int,
    i: int,
) -> None:
    """A single integer that differs from its zero point gives a single weight that is not 0."""
    integers = [[8] * INPUTS for _ in range(OUTPUTS)]
    integers[output][i] = 9
    found = load(weight_format, store(integers, [[8] * GROUPS] * OUTPUTS, [[1.0] * GROUPS] * OUTPUTS))
    assert {(row, at) for row in range(OUTPUTS) for at in range(INPUTS) if found[row][at]} == {(output, i)}
    assert found[output][i] == 1


@pytest.mark.parametrize(("version", "stored_zero"), [("gptq", 7), ("gptq_v2", 8)])
def test_symmetric_gptq_has_zero_points_of_8(version: str, stored_zero: int) -> None:
    weight_format = Int4Format(
        "gptq", GROUP_SIZE, zero_points=False, zero_offset=1 if version == "gptq" else 0
    )
    ones = [[1.0] * GROUPS] * OUTPUTS
    found = load(weight_format, store_gptq(INTEGERS, [[stored_zero] * GROUPS] * OUTPUTS, ones))
    assert found == [[number - 8 for number in row] for row in INTEGERS]


def test_activation_order_assigns_groups_by_the_index() -> None:
    """Input i belongs to group i % 2; columns are stored where the inputs are, and loaded sorted by group."""
    weight_format = Int4Format("gptq", GROUP_SIZE, zero_points=True, activation_order=True, zero_offset=1)
    stored = {**store_gptq_v1(INTEGERS, ZEROS, SCALES), "g_idx": [i % 2 for i in range(INPUTS)]}
    order = [*range(0, INPUTS, 2), *range(1, INPUTS, 2)]
    expected = dequantized(lambda i: i % 2)
    assert load(weight_format, stored) == [[row[i] for i in order] for row in expected]


@pytest.mark.parametrize(
    ("weight_format", "store", "name"),
    [(CASES[1][0], store_gptq_v1, "g_idx"), (CASES[3][0], store_compressed, "weight_g_idx")],
)
def test_groups_in_another_order_than_declared_are_refused(
    weight_format: Int4Format,
    store: Callable[[Table, Table, list[list[float]]], dict[str, Any]],
    name: str,
) -> None:
    consecutive = {name: [i // GROUP_SIZE for i in range(INPUTS)]}
    expected = dequantized(lambda i: i // GROUP_SIZE)
    assert load(weight_format, {**store(INTEGERS, ZEROS, SCALES), **consecutive}) == expected
    with pytest.raises(ModelError, match=f"'proj.{name}' assigns inputs to groups in another order"):
        load(weight_format, {**store(INTEGERS, ZEROS, SCALES), name: [i % 2 for i in range(INPUTS)]})
