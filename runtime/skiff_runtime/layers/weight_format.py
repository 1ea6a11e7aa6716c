"""Weight formats: how a rank stores the matrix of a linear layer, and how a checkpoint does; imports no torch.

A format decides the kernels of a product, the names and shapes of the checkpoint's tensors, and the bytes that a matrix
takes. ``models.quantization`` reads it from a checkpoint's configuration.
"""

from dataclasses import dataclass
from typing import Final, Literal

from skiff_runtime.config import AUTO, QuantizationOption
from skiff_runtime.kernels.constants import FP8_BLOCK, INT4_UNIT, INT4_WORDS, SCALE_COLUMNS_MULTIPLE

GROUP_SIZES: Final = (32, 64, 128)
"""Inputs that share a scale of int4 weights, where not all inputs do."""


@dataclass(frozen=True, slots=True)
class Fp8Format:
    """FP8 (e4m3) with float32 scales.

    Attributes:
        scales: one for each output (``channel``), for each of the checkpoint's modules (``tensor``), or for each block
            of ``FP8_BLOCK`` outputs and inputs (``block``).
        activations: quantized at run time with one scale for each token (``token``) or for each ``FP8_BLOCK`` inputs of
            a token (``group``), or with one scale that the checkpoint holds (``static``).
    """

    scales: Literal["channel", "tensor", "block"] = "channel"
    activations: Literal["token", "group", "static"] = "token"

    def matrix_bytes(self, outputs: int, inputs: int, parts: int, element_bytes: int) -> int:
        """Compute the bytes of a matrix that packs ``parts`` modules."""
        count = outputs
        if self.scales == "block":
            count = count_blocks(outputs) * padded_scale_columns(inputs)
        return outputs * inputs + 4 * count + (4 * parts if self.activations == "static" else 0)

    def expert_bytes(self, outputs: int, inputs: int) -> int:
        """Compute the bytes of an expert's matrix, whose scales of blocks are not padded."""
        count = count_blocks(outputs) * count_blocks(inputs) if self.scales == "block" else outputs
        return outputs * inputs + 4 * count


@dataclass(frozen=True, slots=True)
class Int4Format:
    """Unsigned 4-bit integers: a weight is (integer - zero point) * scale; activations keep the model's dtype.

    Attributes:
        packing: the convention by which the checkpoint packs integers and zero points into words.
        group_size: the inputs that share a scale and a zero point; ``None``: all inputs of an output.
        zero_points: False where every zero point is 8.
        activation_order: True where the checkpoint assigns each input its group (GPTQ's ``desc_act``).
        zero_offset: the number to add to a stored zero point, modulo 16.
    """

    packing: Literal["compressed-tensors", "awq", "gptq"]
    group_size: int | None
    zero_points: bool
    activation_order: bool = False
    zero_offset: int = 0

    def count_groups(self, inputs: int) -> int:
        """Return the number of groups of a row."""
        return 1 if self.group_size is None else -(-inputs // self.group_size)

    def matrix_bytes(self, outputs: int, inputs: int, parts: int, element_bytes: int) -> int:
        """Compute the bytes of a matrix that packs ``parts`` modules."""
        tables = 2 if self.zero_points else 1
        order = 4 * inputs * parts if self.activation_order else 0
        groups = self.count_groups(inputs)
        return outputs * (4 * count_words(inputs) + tables * groups * element_bytes) + order


WeightFormat = Fp8Format | Int4Format

FP8_CHANNEL: Final = Fp8Format()
"""The format to which ``--quantization fp8`` quantizes unquantized weights."""


def choose_weight_format(
    quantization: QuantizationOption, stored: WeightFormat | None
) -> WeightFormat | None:
    """Return the format of quantized matrices; ``None`` where there are none.

    ``stored`` is that of the checkpoint; without one, weights are quantized at load if ``quantization`` names a method.
    """
    if quantization == AUTO:
        return stored
    return None if quantization == "none" else stored or FP8_CHANNEL


def count_blocks(size: int) -> int:
    """Return the number of blocks of ``FP8_BLOCK`` outputs or inputs."""
    return -(-size // FP8_BLOCK)


def padded_scale_columns(inputs: int) -> int:
    """Return the columns of block FP8's scales, padded."""
    return -(-count_blocks(inputs) // SCALE_COLUMNS_MULTIPLE) * SCALE_COLUMNS_MULTIPLE


def count_words(inputs: int) -> int:
    """Return the int32 words that a row of int4 weights takes."""
    return -(-inputs // INT4_UNIT) * INT4_WORDS
