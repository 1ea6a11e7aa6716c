"""POST /generate, the native endpoint: text or token ids in, text and token ids out."""

import secrets
from collections.abc import Sequence
from typing import Any

from skiff_runtime.api.formats.logprobs import value
from skiff_runtime.api.formats.request_spec import (
    FINISH_REASONS,
    Answer,
    Generation,
    ServedModel,
    text_options,
)
from skiff_runtime.api.parsing.structured_outputs import build_response_grammar, check_grammar_conflicts
from skiff_runtime.api.schemas.request_bodies import GenerateBody
from skiff_runtime.api.schemas.validation import parse
from skiff_runtime.api.sse import DONE, encode_json, event
from skiff_runtime.api.usage import format_usage
from skiff_runtime.messages import NO_TOKEN, FinishReason, StreamOpened, TextLogprobs, Usage


def prepare_generate(raw: bytes, model: ServedModel) -> Generation:
    """Validate a body. Raises ``RequestError``. Without ``max_tokens``, the output may fill the context."""
    body = parse(GenerateBody, raw)
    prompt = body.text if body.token_ids is None else body.token_ids
    assert prompt is not None
    return Generation(
        prompts=[prompt],
        sampling=model.sampling(body, logprobs=body.logprobs, prompt_logprobs=body.prompt_logprobs),
        text=text_options(body),
        reply=GenerateResponseFormatter(),
        stream=bool(body.stream),
        priority=body.priority or 0,
        grammar=check_grammar_conflicts(body, build_response_grammar(body)),
        user=body.user,
        cache_salt=body.cache_salt,
    )


class GenerateResponseFormatter:
    """Writes native replies: ``{"id", "text", "token_ids", "finish_reason", "usage"}``; increments of it in a stream.

    Where asked for, ``logprobs`` and ``prompt_logprobs`` list ``{"token_id", "logprob", "top": [[id, logprob], ...]}``.
    """

    def __init__(self) -> None:
        self.id = f"gen-{secrets.token_hex(12)}"
        self._choice = GenerateChoiceFormatter(self.id)

    def choice(self, index: int) -> "GenerateChoiceFormatter":
        return self._choice

    def open(self, index: int, opened: StreamOpened) -> None:
        pass

    def ending(self, usage: Usage) -> bytes:
        end: dict[str, Any] = {"text": "", "token_ids": [], "finish_reason": self._choice.reason}
        return event({"id": self.id, **end, "usage": format_usage(usage)}) + DONE

    def whole(self, choices: list[dict[str, Any]], usage: Usage) -> bytes:
        return encode_json({"id": self.id, **choices[0], "usage": format_usage(usage)})


class GenerateChoiceFormatter:
    """Writes the only choice of a reply. ``reason``: why it ended."""

    __slots__ = ("_id", "reason")

    def __init__(self, id: str) -> None:
        self._id = id
        self.reason: str | None = None

    def opening(self) -> bytes:
        return b""

    def prompt(self, tokens: list[TextLogprobs]) -> bytes:
        return event({"id": self._id, "text": "", "token_ids": [], "prompt_logprobs": _told(tokens)})

    def delta(self, text: str, token: int, logprobs: TextLogprobs | None) -> bytes:
        if token == NO_TOKEN and not text:
            return b""
        fields = {"id": self._id, "text": text, "token_ids": [] if token == NO_TOKEN else [token]}
        return event(fields if logprobs is None else {**fields, "logprobs": _told([logprobs])})

    def closing(self, finish: FinishReason) -> bytes:
        self.reason = FINISH_REASONS[finish]
        return b""

    def whole(self, answer: Answer) -> dict[str, Any]:
        choice = {
            "text": answer.text,
            "token_ids": answer.tokens,
            "finish_reason": FINISH_REASONS[answer.finish],
        }
        if answer.logprobs:
            choice["logprobs"] = _told(answer.logprobs)
        if answer.prompt:
            choice["prompt_logprobs"] = _told(answer.prompt)
        return choice


def _told(tokens: Sequence[TextLogprobs]) -> list[dict[str, Any]]:
    return [
        {
            "token_id": each.chosen.token,
            "logprob": value(each.chosen.logprob),
            "top": [[top.token, value(top.logprob)] for top in each.top],
        }
        for each in tokens
    ]
