"""What an endpoint makes of a request body: a prompt, how to sample, and how to write the reply."""

import secrets
from dataclasses import dataclass
from typing import Final, Protocol

from skiff_runtime.api.schemas import Sampling
from skiff_runtime.errors import InvalidRequest, ModelNotFound
from skiff_runtime.launch import Launch
from skiff_runtime.messages import ChatPrompt, Finish, SamplingParams, TextOptions, Usage
from skiff_runtime.models.config import SamplingDefaults

FINISH_REASONS: Final = {Finish.STOP: "stop", Finish.LENGTH: "length", Finish.ABORT: "abort"}


class ReplyFormat(Protocol):
    """How one endpoint writes one reply. The first four are server-sent events, ready to send; "" is none."""

    def opening(self) -> bytes:
        """Before the first increment."""
        ...

    def delta(self, text: str, token: int) -> bytes:
        """One increment; ``text`` may be "", ``token`` may be ``NO_TOKEN``."""
        ...

    def closing(self, finish: Finish, usage: Usage) -> bytes:
        """After the last increment."""
        ...

    def whole(self, text: str, tokens: list[int], finish: Finish, usage: Usage) -> bytes:
        """The JSON body of a reply that is not streamed."""
        ...


@dataclass(frozen=True, slots=True)
class Generation:
    """One validated request. ``user``: whom the client says it asks for, for the log."""

    prompt: str | list[int] | ChatPrompt
    sampling: SamplingParams
    text: TextOptions
    reply: ReplyFormat
    stream: bool
    user: str | None = None


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What endpoints know of the model."""

    name: str
    vocab_size: int
    max_model_len: int
    defaults: SamplingDefaults

    @staticmethod
    def of(launch: Launch) -> "ServedModel":
        """The model of a resolved launch."""
        name, max_model_len = launch.config.served_model_name, launch.config.max_model_len
        assert name is not None and max_model_len is not None, "the configuration is resolved"
        return ServedModel(
            name=name,
            vocab_size=launch.model.vocab_size,
            max_model_len=max_model_len,
            defaults=launch.model.sampling,
        )

    def check_name(self, name: str) -> None:
        """Raise ``ModelNotFound`` for a model that is not served here."""
        if name != self.name:
            raise ModelNotFound(
                f"the model {name[:200]!r} is not served here; served is {self.name!r}", param="model"
            )

    def sampling(self, body: Sampling, max_tokens: int) -> SamplingParams:
        """How to choose tokens: what the body says, else what the model recommends, else no restriction."""
        top_k = _first(body.top_k, self.defaults.top_k, 0)
        return SamplingParams(
            max_tokens=max_tokens,
            seed=secrets.randbits(63) if body.seed is None else body.seed,
            temperature=_first(body.temperature, self.defaults.temperature, 1.0),
            top_k=max(0, int(top_k)),
            top_p=_first(body.top_p, self.defaults.top_p, 1.0),
            min_p=_first(body.min_p, self.defaults.min_p, 0.0),
            ignore_eos=bool(body.ignore_eos),
            stop_token_ids=self._stop_tokens(body),
        )

    def _stop_tokens(self, body: Sampling) -> tuple[int, ...]:
        tokens = tuple(body.stop_token_ids or ())
        for token in tokens:
            if token >= self.vocab_size:
                raise InvalidRequest(
                    f"stop token id {token} is not from 0 to {self.vocab_size - 1}, the model's vocabulary",
                    param="stop_token_ids",
                )
        return tokens


def text_options(body: Sampling, *, skip_special_tokens: bool = True) -> TextOptions:
    """What the detokenizer needs to know of ``body``."""
    return TextOptions(stop=tuple(body.stop or ()), skip_special_tokens=skip_special_tokens)


def _first(wanted: float | None, recommended: float | None, otherwise: float) -> float:
    if wanted is not None:
        return wanted
    return otherwise if recommended is None else recommended
