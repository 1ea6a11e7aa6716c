"""How a caller of ``LLM`` asks for tokens to be chosen."""

import math
import secrets
from dataclasses import dataclass
from typing import Final

from skiff_runtime.errors import InvalidRequest
from skiff_runtime.messages import SamplingParams
from skiff_runtime.models.config import SamplingDefaults

MAX_SEED: Final = (1 << 63) - 1


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
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise InvalidRequest(f"{name} must be from {low} to {high}, not {value}", param=name)
        if "" in self.stop:
            raise InvalidRequest("a stop string must not be empty", param="stop")

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


_RANGES: Final[tuple[tuple[str, float, float], ...]] = (
    ("max_tokens", 1, math.inf),
    ("temperature", 0.0, 100.0),
    ("top_k", 0, math.inf),
    ("top_p", 1e-6, 1.0),
    ("min_p", 0.0, 1.0),
    ("seed", 0, MAX_SEED),
)


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)
