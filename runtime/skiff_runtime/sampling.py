"""How a caller of ``LLM`` asks for tokens to be chosen."""

import secrets
from dataclasses import dataclass
from typing import Final

from skiff_runtime.errors import InvalidRequest
from skiff_runtime.messages import SamplingParams
from skiff_runtime.models.config import SamplingDefaults

MAX_SEED: Final = (1 << 63) - 1
MAX_COUNT: Final = (1 << 31) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the tokens of a completion are chosen, and when it ends.

    ``None`` means: what the model recommends (temperature, top_k, top_p, min_p), what the
    context leaves (max_tokens), or a random one (seed). Temperature 0 is greedy.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        """Refuse what no sampler can do."""
        for name, kind, low, high in _RANGES:
            value = getattr(self, name)
            if value is not None and not (_is(value, kind) and low <= value <= high):
                what = "a whole number" if kind is int else "a number"
                raise InvalidRequest(f"{name} must be {what} from {low} to {high}, not {value!r}", param=name)
        if not (_is_list(self.stop, str) and all(self.stop)):
            raise InvalidRequest("stop must be a tuple of strings, none of them empty", param="stop")
        if not _is_list(self.stop_token_ids, int):
            raise InvalidRequest("stop_token_ids must be a tuple of token ids", param="stop_token_ids")

    def params(self, defaults: SamplingDefaults) -> SamplingParams:
        """As the scheduler wants it; ``max_tokens`` 0 stands for what the context leaves."""
        return SamplingParams(
            max_tokens=self.max_tokens or 0,
            seed=secrets.randbelow(MAX_SEED) if self.seed is None else self.seed,
            temperature=_first(self.temperature, defaults.temperature, 1.0),
            top_k=int(_first(self.top_k, defaults.top_k, 0)),
            top_p=_first(self.top_p, defaults.top_p, 1.0),
            min_p=_first(self.min_p, defaults.min_p, 0.0),
            ignore_eos=self.ignore_eos,
            stop_token_ids=self.stop_token_ids,
        )


_RANGES: Final[tuple[tuple[str, type, float, float], ...]] = (
    ("max_tokens", int, 1, MAX_COUNT),
    ("temperature", float, 0.0, 100.0),
    ("top_k", int, 0, MAX_COUNT),
    ("top_p", float, 1e-6, 1.0),
    ("min_p", float, 0.0, 1.0),
    ("seed", int, 0, MAX_SEED),
)


def _is(value: object, kind: type) -> bool:
    """Whether a value has the type that crosses processes; a whole number is a number, too."""
    return isinstance(value, kind | int) and not isinstance(value, bool)


def _is_list(value: object, kind: type) -> bool:
    return isinstance(value, tuple | list) and all(isinstance(each, kind) for each in value)


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)
