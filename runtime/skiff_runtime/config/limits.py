"""Bounds on the parameters of a request, shared by the API's schemas and the offline ``SamplingParams``."""

from typing import Final, NamedTuple

MAX_OUTPUT_TOKENS: Final = (1 << 31) - 1
MAX_STOP_STRINGS: Final = 16
MAX_STOP_STRING_CHARACTERS: Final = 256
MAX_STOP_TOKENS: Final = 64
MAX_CHOICES: Final = 128
MAX_LOGIT_BIASES: Final = 1024
MAX_LOGPROBS: Final = 20
MAX_BAD_WORDS: Final = 128
MAX_BAD_WORD_CHARACTERS: Final = 64
MAX_BAD_WORD_TOKENS: Final = 1024
"""Of all bad words of a request, each in up to two spellings: they are compared with the output in every step."""
MAX_ALLOWED_TOKENS: Final = 1024


class Range(NamedTuple):
    """A range of numbers; both ends belong to it, except that ``exclusive_low`` leaves out ``low``."""

    low: float
    high: float
    exclusive_low: bool = False

    def contains(self, value: float) -> bool:
        """Return whether ``value`` lies in the range. NaN does not."""
        return (self.low < value if self.exclusive_low else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        if self.exclusive_low:
            return f"above {self.low} and at most {self.high}"
        return f"from {self.low} to {self.high}"


TEMPERATURE: Final = Range(0.0, 2.0)
TOP_P: Final = Range(0.0, 1.0, exclusive_low=True)
TOP_K: Final = Range(-1, MAX_OUTPUT_TOKENS)
"""Both -1 and 0 disable top-k."""
MIN_P: Final = Range(0.0, 1.0)
SEED: Final = Range(-(1 << 63), (1 << 63) - 1)
PENALTY: Final = Range(-2.0, 2.0)
"""Of presence and frequency penalties."""
REPETITION_PENALTY: Final = Range(0.0, 2.0, exclusive_low=True)
LOGIT_BIAS: Final = Range(-100.0, 100.0)
