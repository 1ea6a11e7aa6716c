"""POST /v1/chat/completions."""

import secrets
import time
from typing import Any

from skiff_runtime.api.generation import FINISH_REASONS, Generation, ServedModel, text_options
from skiff_runtime.api.schemas import ChatRequest, Message
from skiff_runtime.api.sse import DONE, EventFrame, encode_json, event
from skiff_runtime.api.usage import usage_json
from skiff_runtime.api.validation import parse
from skiff_runtime.messages import ChatPrompt, Finish, Usage

_ROLES = {"developer": "system"}


def prepare_chat(raw: bytes, model: ServedModel) -> Generation:
    """Validate a body. Raises ``RequestError``. Without a limit, the answer may fill the context."""
    body = parse(ChatRequest, raw)
    model.check_name(body.model)
    include_usage = body.stream_options is not None and body.stream_options.include_usage
    return Generation(
        prompt=ChatPrompt([_message(each) for each in body.messages]),
        sampling=model.sampling(body, body.max_completion_tokens or body.max_tokens or 0),
        text=text_options(body),
        reply=ChatFormat(model.name, include_usage=include_usage),
        stream=bool(body.stream),
        user=body.user,
    )


def _message(message: Message) -> dict[str, str]:
    content = "".join(part.text for part in message.content)
    return {"role": _ROLES.get(message.role, message.role), "content": content}


class ChatFormat:
    """Writes chat completions and their chunks."""

    def __init__(self, model: str, *, include_usage: bool) -> None:
        self._head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        self._include_usage = include_usage
        hole = f"<{self._head['id']}>"
        self._frame = EventFrame(self._chunk({"content": hole}), hole)

    def opening(self) -> bytes:
        return event(self._chunk({"role": "assistant", "content": ""}))

    def delta(self, text: str, token: int) -> bytes:
        return self._frame.fill(text) if text else b""

    def closing(self, finish: Finish, usage: Usage) -> bytes:
        data = event(self._chunk({}, finish))
        if self._include_usage:
            data += event({**self._chunk({}), "choices": [], "usage": usage_json(usage)})
        return data + DONE

    def whole(self, text: str, tokens: list[int], finish: Finish, usage: Usage) -> bytes:
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": None,
            "finish_reason": FINISH_REASONS[finish],
        }
        reply = {**self._head, "object": "chat.completion", "choices": [choice], "usage": usage_json(usage)}
        return encode_json(reply)

    def _chunk(self, delta: dict[str, str], finish: Finish = Finish.RUNNING) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": FINISH_REASONS.get(finish)}
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": [choice]}
        return {**chunk, "usage": None} if self._include_usage else chunk
