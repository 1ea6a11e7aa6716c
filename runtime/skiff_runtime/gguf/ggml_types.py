"""GGML's tensor types: the number by which a GGUF file names each of them, and the size of its blocks."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class GgmlType:
    """A tensor type: every ``block_elements`` consecutive elements of a row take ``block_bytes`` bytes."""

    name: str
    block_elements: int
    block_bytes: int

    @property
    def is_quantized(self) -> bool:
        """True for a type whose elements share the scales of their block."""
        return self.block_elements > 1


GGML_TYPES: Final[dict[int, GgmlType]] = {
    0: GgmlType("F32", 1, 4),
    1: GgmlType("F16", 1, 2),
    2: GgmlType("Q4_0", 32, 18),
    3: GgmlType("Q4_1", 32, 20),
    6: GgmlType("Q5_0", 32, 22),
    7: GgmlType("Q5_1", 32, 24),
    8: GgmlType("Q8_0", 32, 34),
    10: GgmlType("Q2_K", 256, 84),
    11: GgmlType("Q3_K", 256, 110),
    12: GgmlType("Q4_K", 256, 144),
    13: GgmlType("Q5_K", 256, 176),
    14: GgmlType("Q6_K", 256, 210),
    16: GgmlType("IQ2_XXS", 256, 66),
    17: GgmlType("IQ2_XS", 256, 74),
    18: GgmlType("IQ3_XXS", 256, 98),
    19: GgmlType("IQ1_S", 256, 50),
    20: GgmlType("IQ4_NL", 32, 18),
    21: GgmlType("IQ3_S", 256, 110),
    22: GgmlType("IQ2_S", 256, 82),
    23: GgmlType("IQ4_XS", 256, 136),
    29: GgmlType("IQ1_M", 256, 56),
    30: GgmlType("BF16", 1, 2),
    34: GgmlType("TQ1_0", 256, 54),
    35: GgmlType("TQ2_0", 256, 66),
    39: GgmlType("MXFP4", 32, 17),
}
"""The types that the ``gguf`` package dequantizes, by their numbers in GGML's ``enum ggml_type``."""
