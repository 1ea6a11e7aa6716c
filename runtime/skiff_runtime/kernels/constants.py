"""Constants that references, kernels and weight formats share; imports no torch."""

from typing import Final

BITS_PER_WORD: Final = 32
"""The tokens of one int32 word of a token bitmask."""
LARGEST_LOGIT: Final = 1e29
"""The largest magnitude that a penalty may give a logit, so that no later arithmetic overflows."""
FP8_BLOCK: Final = 128
"""Outputs and inputs of a block of block FP8, and inputs of a group of its activations."""
SCALE_COLUMNS_MULTIPLE: Final = 4
"""The scales of a row of blocks are padded to a multiple of it, as the GPU's library reads them."""
INT4_UNIT: Final = 128
"""Inputs of a row that int4 weights interleave in 16 words of eight; a row is padded to a multiple of it."""
INT4_WORDS: Final = INT4_UNIT // 8
"""The words of a unit."""
DEQUANTIZED_BYTES: Final = 64 << 20
"""Bound of the part of an int4 weight that is dequantized at a time, before it is multiplied."""
VOCAB_SHARD_MULTIPLE: Final = 8
"""Columns of a rank's shard of the vocabulary come in multiples of it, so that rows of logits in a type of 16 bits begin at
multiples of 16 bytes: kernels that load or store as much at a time, cuBLAS's among them, need that."""


def vocab_shard_size(vocab_size: int, tp_size: int) -> int:
    """Return the columns of each rank's shard of the vocabulary, padding included; one rank has none."""
    if tp_size == 1:
        return vocab_size
    columns = -(-vocab_size // tp_size)
    return -(-columns // VOCAB_SHARD_MULTIPLE) * VOCAB_SHARD_MULTIPLE
