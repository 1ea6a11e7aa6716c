"""The sampling parameters that a user can set, by a flag of ``skiff chat`` or by ``/set``."""

from typing import Any, Final, NamedTuple

from skiff_runtime.config import limits
from skiff_runtime.config.limits import Range

DEFAULT: Final = "default"


class Parameter(NamedTuple):
    """A parameter's type, its range, and its help text."""

    kind: type
    allowed: Range
    text: str


PARAMETERS: Final[dict[str, Parameter]] = {
    "temperature": Parameter(float, limits.TEMPERATURE, "randomness; 0 always takes the most likely token"),
    "top_p": Parameter(
        float, limits.TOP_P, "sample from the most likely tokens that together have this probability"
    ),
    "top_k": Parameter(int, limits.TOP_K, "sample from this many of the most likely tokens; -1 is off"),
    "min_p": Parameter(
        float, limits.MIN_P, "leave out tokens less likely than this fraction of the most likely one"
    ),
    "presence_penalty": Parameter(float, limits.PENALTY, "penalize tokens that occur in the answer so far"),
    "frequency_penalty": Parameter(
        float, limits.PENALTY, "penalize tokens by the number of times that they occur in the answer so far"
    ),
    "repetition_penalty": Parameter(
        float,
        limits.REPETITION_PENALTY,
        "penalize tokens that occur in the prompt or in the answer so far; 1 is off",
    ),
    "max_tokens": Parameter(int, Range(1, limits.MAX_OUTPUT_TOKENS), "the longest answer, in tokens"),
    "seed": Parameter(int, limits.SEED, "makes answers repeatable"),
}


def parse_parameter(name: str, text: str) -> Any:
    """Return a parameter's value, None for ``default``. Raises ``ValueError`` with a message for the user."""
    parameter = PARAMETERS.get(name)
    if parameter is None:
        raise ValueError(f"There is no parameter {name}; the parameters are {', '.join(PARAMETERS)}")
    if text == DEFAULT:
        return None
    expected = "a whole number" if parameter.kind is int else "a number"
    try:
        value = parameter.kind(text)
    except ValueError:
        value = float("nan")
    if not parameter.allowed.contains(value):
        raise ValueError(f"{name} must be {expected} {parameter.allowed}, or {DEFAULT}, not {text!r}")
    return value
