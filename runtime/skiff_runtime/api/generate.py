"""POST /generate, the native endpoint: text or token ids in, text and token ids out."""

import secrets

from skiff_runtime.api.generation import FINISH_REASONS, Generation, ServedModel, text_options
from skiff_runtime.api.schemas import GenerateBody
from skiff_runtime.api.sse import DONE, encode_json, event
from skiff_runtime.api.usage import usage_json
from skiff_runtime.api.validation import parse
from skiff_runtime.messages import NO_TOKEN, Finish, Usage


def prepare_generate(raw: bytes, model: ServedModel) -> Generation:
    """Validate a body. Raises ``RequestError``. Without ``max_tokens``, the output may fill the context."""
    body = parse(GenerateBody, raw)
    prompt = body.text if body.token_ids is None else body.token_ids
    assert prompt is not None
    return Generation(
        prompt=prompt,
        sampling=model.sampling(body, body.max_tokens or 0),
        text=text_options(body, skip_special_tokens=body.skip_special_tokens),
        reply=GenerateFormat(),
        stream=bool(body.stream),
    )


class GenerateFormat:
    """Writes native replies: ``{"id", "text", "token_ids", "finish_reason", "usage"}``; increments of it in a stream."""

    def __init__(self) -> None:
        self._id = f"gen-{secrets.token_hex(12)}"

    def opening(self) -> bytes:
        return b""

    def delta(self, text: str, token: int) -> bytes:
        if token == NO_TOKEN and not text:
            return b""
        return event({"id": self._id, "text": text, "token_ids": [] if token == NO_TOKEN else [token]})

    def closing(self, finish: Finish, usage: Usage) -> bytes:
        return event(self._end("", [], finish, usage)) + DONE

    def whole(self, text: str, tokens: list[int], finish: Finish, usage: Usage) -> bytes:
        return encode_json(self._end(text, tokens, finish, usage))

    def _end(self, text: str, tokens: list[int], finish: Finish, usage: Usage) -> dict[str, object]:
        return {
            "id": self._id,
            "text": text,
            "token_ids": tokens,
            "finish_reason": FINISH_REASONS[finish],
            "usage": usage_json(usage),
        }
