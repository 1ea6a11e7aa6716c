"""What an endpoint makes of a request body: a prompt, how to sample, and how to write the reply."""

import hashlib
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

from skiff_runtime import __version__
from skiff_runtime.api.parsing.output_format import OutputFormat
from skiff_runtime.api.schemas.request_bodies import Sampling
from skiff_runtime.api.sse import encode_json
from skiff_runtime.errors import InvalidRequest, ModelNotFound
from skiff_runtime.messages import (
    ChatPrompt,
    FinishReason,
    Grammar,
    SamplingSpec,
    StreamOpened,
    TextLogprobs,
    TextOptions,
    Usage,
)
from skiff_runtime.models.config import SamplingDefaults
from skiff_runtime.processes.launch import Launch

FINISH_REASONS: Final = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
    FinishReason.TIMEOUT: "length",
}
"""What clients are told. A deadline is a limit of length: OpenAI's clients know no other word for an answer cut short."""

_TOKEN_ID: Final = re.compile(r"0|[1-9][0-9]{0,9}")
_MAX_SHOWN_CHARACTERS: Final = 40

Prompt = str | list[int] | ChatPrompt


class Answer(NamedTuple):
    """One choice, whole. ``logprobs`` of its tokens and ``prompt`` of the prompt's, each where asked for."""

    text: str
    tokens: list[int]
    logprobs: list[TextLogprobs]
    prompt: list[TextLogprobs]
    finish: FinishReason


class ChoiceFormatter(Protocol):
    """How an endpoint writes one choice. All but the last are server-sent events, ready to send; b"" is none."""

    def opening(self) -> bytes:
        """Before the first increment."""
        ...

    def prompt(self, tokens: list[TextLogprobs]) -> bytes:
        """Log-probabilities of the prompt's next tokens."""
        ...

    def delta(self, text: str, token: int, logprobs: TextLogprobs | None) -> bytes:
        """One increment; ``text`` may be "", ``token`` may be ``NO_TOKEN``."""
        ...

    def closing(self, finish: FinishReason) -> bytes:
        """After the last increment."""
        ...

    def whole(self, answer: Answer) -> dict[str, Any]:
        """The choice in a reply that is not streamed."""
        ...


class ResponseFormatter(Protocol):
    """How an endpoint writes one reply, of one choice or several. ``id``: by which its client knows it."""

    id: str

    def choice(self, index: int) -> ChoiceFormatter:
        """The format of choice ``index``."""
        ...

    def open(self, index: int, opened: StreamOpened) -> None:
        """Choice ``index`` of a stream is being computed."""
        ...

    def ending(self, usage: Usage) -> bytes:
        """The last events of a stream, after the end of every choice."""
        ...

    def whole(self, choices: list[dict[str, Any]], usage: Usage) -> bytes:
        """The JSON body of a reply that is not streamed."""
        ...


@dataclass(frozen=True, slots=True)
class Generation:
    """One validated request: ``copies`` choices for each of its prompts, numbered prompt by prompt.

    ``user``: whom the client says it asks for, for the log. ``cache_salt``: the request shares cached prefixes only with
    requests that send the same one.
    """

    prompts: Sequence[Prompt]
    sampling: SamplingSpec
    text: TextOptions
    reply: ResponseFormatter
    stream: bool
    copies: int = 1
    priority: int = 0
    grammar: Grammar | None = None
    user: str | None = None
    cache_salt: str | None = None

    @property
    def choices(self) -> int:
        """How many answers are asked for."""
        return len(self.prompts) * self.copies


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What endpoints know of the model. ``fingerprint``: equal where version, model and configuration are."""

    name: str
    fingerprint: str
    vocab_size: int
    max_model_len: int
    defaults: SamplingDefaults
    formats: OutputFormat = OutputFormat()

    @staticmethod
    def of(launch: Launch) -> "ServedModel":
        """The model of a resolved launch."""
        name, max_model_len = launch.config.served_model_name, launch.config.max_model_len
        assert name is not None and max_model_len is not None, "the configuration is resolved"
        return ServedModel(
            name=name,
            fingerprint=_fingerprint(launch),
            vocab_size=launch.model.vocab_size,
            max_model_len=max_model_len,
            defaults=launch.model.sampling,
            formats=OutputFormat.of(launch),
        )

    def check_model_name(self, name: str | None) -> None:
        """Raise ``ModelNotFound`` for a model that is not served here; None means the one that is."""
        if name is not None and name != self.name:
            raise ModelNotFound(
                f"the model {name[:200]!r} is not served here; served is {self.name!r}", param="model"
            )

    def sampling(
        self, body: Sampling, *, logprobs: int | None = None, prompt_logprobs: int | None = None
    ) -> SamplingSpec:
        """What ``body`` asks for; where it is silent, what the model recommends, else no restriction."""
        top_k = _first(body.top_k, self.defaults.top_k, 0)
        limit = body.max_output_tokens
        return SamplingSpec(
            max_tokens=0 if limit is None else max(1, limit),
            seed=secrets.randbits(62) if body.seed is None else body.seed,
            temperature=_first(body.temperature, self.defaults.temperature, 1.0),
            top_k=max(0, int(top_k)),
            top_p=_first(body.top_p, self.defaults.top_p, 1.0),
            min_p=_first(body.min_p, self.defaults.min_p, 0.0),
            ignore_eos=bool(body.ignore_eos),
            stop_token_ids=self._stop_tokens(body),
            min_tokens=body.min_tokens or 0,
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            repetition_penalty=body.repetition_penalty or 1.0,
            logit_bias=self._logit_bias(body),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
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

    def _logit_bias(self, body: Sampling) -> tuple[tuple[int, float], ...]:
        """In order of ids, so that equal requests are equal."""
        return tuple(sorted((self._biased_token(key), bias) for key, bias in (body.logit_bias or {}).items()))

    def _biased_token(self, key: str) -> int:
        token = int(key) if _TOKEN_ID.fullmatch(key) else self.vocab_size
        if token >= self.vocab_size:
            raise InvalidRequest(
                f"'logit_bias' maps token ids from 0 to {self.vocab_size - 1}, written as strings, to biases; "
                f"{key[:_MAX_SHOWN_CHARACTERS]!r} is none",
                param="logit_bias",
            )
        return token


def text_options(body: Sampling) -> TextOptions:
    """What the detokenizer needs to know of ``body``."""
    return TextOptions(
        stop=tuple(body.stop or ()),
        skip_special_tokens=body.skip_special_tokens is not False,
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
    )


def _fingerprint(launch: Launch) -> str:
    facts = encode_json([__version__, repr(launch.model), launch.config.shown()])
    return "fp_" + hashlib.sha256(facts).hexdigest()[:12]


def _first(wanted: float | None, recommended: float | None, otherwise: float) -> float:
    if wanted is not None:
        return wanted
    return otherwise if recommended is None else recommended
