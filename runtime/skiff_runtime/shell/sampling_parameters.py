"""The parameters of an answer that a person may set, by flag or by ``/set``."""

from typing import Any, Final, NamedTuple

from skiff_runtime.config import limits
from skiff_runtime.config.limits import Range

DEFAULT: Final = "default"


class Parameter(NamedTuple):
    """Its type, its range, and what it does."""

    kind: type
    allowed: Range
    text: str


PARAMETERS: Final[dict[str, Parameter]] = {
    "temperature": Parameter(float, limits.TEMPERATURE, "0 always takes the likeliest token"),
    "top_p": Parameter(
        float, limits.TOP_P, "draw from the likeliest tokens that together have this probability"
    ),
    "top_k": Parameter(int, limits.TOP_K, "draw from so many of the likeliest tokens; -1 is off"),
    "min_p": Parameter(
        float, limits.MIN_P, "leave out tokens less likely than this share of the likeliest one"
    ),
    "presence_penalty": Parameter(float, limits.PENALTY, "against tokens that the answer has already"),
    "frequency_penalty": Parameter(float, limits.PENALTY, "the same, for each time that it has them"),
    "repetition_penalty": Parameter(
        float, limits.REPETITION_PENALTY, "the same, of the prompt, too; 1 is off"
    ),
    "max_tokens": Parameter(int, Range(1, limits.MAX_OUTPUT_TOKENS), "longest answer, in tokens"),
    "seed": Parameter(int, limits.SEED, "makes answers repeatable"),
}


def parse_parameter(name: str, text: str) -> Any:
    """A parameter's value, None for ``default``. Raises ValueError that says what is wrong."""
    parameter = PARAMETERS.get(name)
    if parameter is None:
        raise ValueError(f"There is no {name}; there are {', '.join(PARAMETERS)}")
    if text == DEFAULT:
        return None
    what = "a whole number" if parameter.kind is int else "a number"
    try:
        value = parameter.kind(text)
    except ValueError:
        value = float("nan")
    if not parameter.allowed.holds(value):
        raise ValueError(f"{name} must be {what} {parameter.allowed}, or {DEFAULT}, not {text!r}")
    return value
