"""Constants that the references of sampling operations share with their kernels."""

from typing import Final

BITS_PER_WORD: Final = 32
"""The tokens of one int32 word of a token bitmask."""
LARGEST_LOGIT: Final = 1e29
"""The largest magnitude that a penalty may give a logit, so that no later arithmetic overflows."""
