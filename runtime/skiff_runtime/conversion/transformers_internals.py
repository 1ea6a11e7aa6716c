"""The converter of tiktoken files of transformers, for its default pattern, which splits a text into words.

No other module imports from ``transformers.convert_slow_tokenizer``.
"""

from typing import Final

from skiff_runtime.internals import Shape, borrowed

__all__ = ["TikTokenConverter"]

NEEDED: Final[Shape] = {"transformers.convert_slow_tokenizer:TikTokenConverter": ("pattern",)}

with borrowed("transformers", NEEDED):
    from transformers.convert_slow_tokenizer import TikTokenConverter
