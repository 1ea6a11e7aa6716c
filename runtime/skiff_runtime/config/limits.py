"""How far the parameters of a request may go: one place for the API and for ``LLM``."""

from typing import Final, NamedTuple

MAX_OUTPUT_TOKENS: Final = (1 << 31) - 1
MAX_STOP_STRINGS: Final = 16
MAX_STOP_STRING_CHARACTERS: Final = 256
MAX_STOP_TOKENS: Final = 64
MAX_CHOICES: Final = 128
MAX_LOGIT_BIASES: Final = 1024
MAX_LOGPROBS: Final = 20


class Range(NamedTuple):
    """From ``low`` to ``high``, both included, unless ``above`` leaves ``low`` out."""

    low: float
    high: float
    above: bool = False

    def holds(self, value: float) -> bool:
        """Whether ``value`` lies in it; NaN does not."""
        return (self.low < value if self.above else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        if self.above:
            return f"above {self.low} and at most {self.high}"
        return f"from {self.low} to {self.high}"


TEMPERATURE: Final = Range(0.0, 2.0)
TOP_P: Final = Range(0.0, 1.0, above=True)
TOP_K: Final = Range(-1, MAX_OUTPUT_TOKENS)
"""-1 and 0 both mean: off."""
MIN_P: Final = Range(0.0, 1.0)
SEED: Final = Range(-(1 << 63), (1 << 63) - 1)
PENALTY: Final = Range(-2.0, 2.0)
REPETITION_PENALTY: Final = Range(0.0, 2.0, above=True)
LOGIT_BIAS: Final = Range(-100.0, 100.0)
