"""POST /v1/completions."""

import secrets
import time
from typing import Any

from skiff_runtime.api.generation import FINISH_REASONS, Generation, ServedModel, text_options
from skiff_runtime.api.schemas import DEFAULT_COMPLETION_TOKENS, CompletionRequest
from skiff_runtime.api.sse import DONE, EventFrame, encode_json, event
from skiff_runtime.api.usage import usage_json
from skiff_runtime.api.validation import parse
from skiff_runtime.messages import Finish, Usage


def prepare_completion(raw: bytes, model: ServedModel) -> Generation:
    """Validate a body. Raises ``RequestError``."""
    body = parse(CompletionRequest, raw)
    model.check_name(body.model)
    include_usage = body.stream_options is not None and body.stream_options.include_usage
    return Generation(
        prompt=body.prompt,
        sampling=model.sampling(body, body.max_tokens or DEFAULT_COMPLETION_TOKENS),
        text=text_options(body),
        reply=CompletionFormat(model.name, include_usage=include_usage),
        stream=bool(body.stream),
        user=body.user,
    )


class CompletionFormat:
    """Writes completions; a chunk of a stream has the same shape."""

    def __init__(self, model: str, *, include_usage: bool) -> None:
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._include_usage = include_usage
        hole = f"<{self._head['id']}>"
        self._frame = EventFrame(self._chunk(hole), hole)

    def opening(self) -> bytes:
        return b""

    def delta(self, text: str, token: int) -> bytes:
        return self._frame.fill(text) if text else b""

    def closing(self, finish: Finish, usage: Usage) -> bytes:
        data = event(self._chunk("", finish))
        if self._include_usage:
            data += event({**self._head, "choices": [], "usage": usage_json(usage)})
        return data + DONE

    def whole(self, text: str, tokens: list[int], finish: Finish, usage: Usage) -> bytes:
        return encode_json({**self._head, "choices": [_choice(text, finish)], "usage": usage_json(usage)})

    def _chunk(self, text: str, finish: Finish = Finish.RUNNING) -> dict[str, Any]:
        chunk = {**self._head, "choices": [_choice(text, finish)]}
        return {**chunk, "usage": None} if self._include_usage else chunk


def _choice(text: str, finish: Finish) -> dict[str, Any]:
    return {"index": 0, "text": text, "logprobs": None, "finish_reason": FINISH_REASONS.get(finish)}
