"""POST /generate, the native endpoint: text or token ids in, text and token ids out."""

import secrets
from collections.abc import Sequence
from typing import Any

from skiff_runtime.api.formats.chunks import decode_token_ids, format_usage
from skiff_runtime.api.formats.logprobs import json_logprob
from skiff_runtime.api.formats.openai_errors import OpenAIErrorFormatter
from skiff_runtime.api.formats.request_spec import FINISH_REASONS, ChoiceOutput, RequestSpec
from skiff_runtime.api.formats.served_model import ServedModel, make_prompt_options, make_text_options
from skiff_runtime.api.parsing.structured_outputs import build_response_grammar, check_grammar_conflicts
from skiff_runtime.api.schemas.request_bodies import GenerateBody
from skiff_runtime.api.schemas.validation import parse_body, validate_fields
from skiff_runtime.messages import NO_TOKEN, FinishReason, StreamOpened, TextLogprobs, Usage
from skiff_runtime.sse import DONE_EVENT, encode_event, encode_json


def prepare_generate(raw: bytes, model: ServedModel) -> RequestSpec:
    """Validate a request body. Raises ``RequestError``. Without ``max_tokens``, the output may fill the context."""
    body = parse_body(GenerateBody, raw, strict=model.is_strict)
    if (fields := body.translate()) is not None:
        body = validate_fields(GenerateBody, fields)
    model = model.choose(body.model or body.lora_path)
    prompt = body.text if body.token_ids is None else body.token_ids
    assert prompt is not None
    grammar = build_response_grammar(body)
    check_grammar_conflicts(body, grammar)
    return RequestSpec(
        prompts=[prompt],
        sampling=model.make_sampling_spec(body, logprobs=body.logprobs, prompt_logprobs=body.prompt_logprobs),
        text=make_text_options(body),
        formatter=GenerateResponseFormatter(return_token_ids=bool(body.return_token_ids)),
        stream=bool(body.stream),
        priority=body.priority or 0,
        grammar=grammar,
        user=body.end_user,
        cache_salt=body.cache_salt,
        adapter_id=model.adapter_id,
        prompt_options=make_prompt_options(body),
    )


class GenerateResponseFormatter(OpenAIErrorFormatter):
    """Writes ``{"id", "text", "token_ids", "finish_reason", "usage"}``, or in a stream increments of it.

    A request may ask for ``logprobs`` and ``prompt_logprobs``: lists of
    ``{"token_id", "logprob", "top": [[id, logprob], ...]}``. With ``return_token_ids`` the response, or the last event of
    a stream, has the ``prompt_token_ids`` as well.
    """

    def __init__(self, *, return_token_ids: bool = False) -> None:
        self._return_token_ids = return_token_ids
        self._prompt_fields: dict[str, Any] = {}
        self.id = f"gen-{secrets.token_hex(12)}"
        self._choice = GenerateChoiceFormatter(self.id)

    def make_choice_formatter(self, index: int) -> "GenerateChoiceFormatter":
        return self._choice

    def start_choice(self, index: int, opened: StreamOpened) -> None:
        if self._return_token_ids:
            self._prompt_fields = {"prompt_token_ids": decode_token_ids(opened.prompt_token_ids)}

    def format_ending(self, usage: Usage) -> bytes:
        end: dict[str, Any] = {"text": "", "token_ids": [], "finish_reason": self._choice.finish_reason}
        ending = {"id": self.id, **end, "usage": format_usage(usage), **self._prompt_fields}
        return encode_event(ending) + DONE_EVENT

    def format_full(self, choices: list[dict[str, Any]], usage: Usage) -> bytes:
        body = {"id": self.id, **choices[0], "usage": format_usage(usage), **self._prompt_fields}
        return encode_json(body)


class GenerateChoiceFormatter:
    """Writes the only choice of a response. ``finish_reason`` is None until the choice has ended."""

    __slots__ = ("_id", "finish_reason")

    def __init__(self, id: str) -> None:
        self._id = id
        self.finish_reason: str | None = None

    def format_opening(self) -> bytes:
        return b""

    def format_prompt_logprobs(self, tokens: list[TextLogprobs]) -> bytes:
        return encode_event(
            {"id": self._id, "text": "", "token_ids": [], "prompt_logprobs": _format_logprobs(tokens)}
        )

    def format_delta(self, text: str, token: int, logprobs: TextLogprobs | None) -> bytes:
        if token == NO_TOKEN and not text:
            return b""
        fields: dict[str, Any] = {
            "id": self._id,
            "text": text,
            "token_ids": [] if token == NO_TOKEN else [token],
        }
        if logprobs is not None:
            fields["logprobs"] = _format_logprobs([logprobs])
        return encode_event(fields)

    def format_closing(self, finish_reason: FinishReason) -> bytes:
        self.finish_reason = FINISH_REASONS[finish_reason]
        return b""

    def format_full(self, output: ChoiceOutput) -> dict[str, Any]:
        choice = {
            "text": output.text,
            "token_ids": output.token_ids,
            "finish_reason": FINISH_REASONS[output.finish_reason],
        }
        if output.logprobs:
            choice["logprobs"] = _format_logprobs(output.logprobs)
        if output.prompt_logprobs:
            choice["prompt_logprobs"] = _format_logprobs(output.prompt_logprobs)
        return choice


def _format_logprobs(tokens: Sequence[TextLogprobs]) -> list[dict[str, Any]]:
    return [
        {
            "token_id": each.chosen.token,
            "logprob": json_logprob(each.chosen.logprob),
            "top": [[top.token, json_logprob(top.logprob)] for top in each.top],
        }
        for each in tokens
    ]
