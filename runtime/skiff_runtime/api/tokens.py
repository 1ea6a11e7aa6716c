"""POST /tokenize and /detokenize: what the model's tokenizer makes of a prompt, and of token ids, in vLLM's shapes."""

from typing import Annotated, Self

import numpy as np
from pydantic import Field, JsonValue, model_validator
from pydantic_core import PydanticCustomError

from skiff_runtime.api.chat import chat_prompt
from skiff_runtime.api.generation import ServedModel
from skiff_runtime.api.message_schemas import Message
from skiff_runtime.api.queries import Queries
from skiff_runtime.api.schemas import (
    MAX_MESSAGES,
    MAX_TEMPLATE_OPTIONS,
    ChatRequest,
    Strict,
    TokenIds,
)
from skiff_runtime.api.tool_schemas import ToolFields
from skiff_runtime.api.validation import parse
from skiff_runtime.messages import ChatPrompt, Decoded, DecodeRequest, Encoded, EncodeRequest, Wire

ModelName = Annotated[str, Field(min_length=1, max_length=512)]


class TokenizeBody(ToolFields):
    """POST /tokenize: a text in ``prompt``, or a conversation in ``messages`` with what the chat endpoint takes beside.

    ``add_special_tokens`` is for a text; a conversation's template writes its own.
    """

    model: ModelName | None = None
    prompt: str | None = None
    messages: (
        Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | None
    ) = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Annotated[dict[str, JsonValue], Field(max_length=MAX_TEMPLATE_OPTIONS)] | None = (
        None
    )

    @model_validator(mode="after")
    def _one_input(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("input", "send either 'prompt' or 'messages'")
        if self.prompt is not None and any(getattr(self, name) is not None for name in _CHAT_FIELDS):
            raise PydanticCustomError("input", "'prompt' takes none of the fields that belong to 'messages'")
        return self


_CHAT_FIELDS = {
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    *ToolFields.model_fields,
}


class DetokenizeBody(Strict):
    """POST /detokenize."""

    model: ModelName | None = None
    tokens: TokenIds


class TokenActions:
    """What the two endpoints do."""

    def __init__(self, model: ServedModel, queries: Queries) -> None:
        self._model = model
        self._queries = queries

    async def tokenize(self, raw: bytes) -> dict[str, object]:
        """Token ids of a prompt, as they would be computed."""
        body = parse(TokenizeBody, raw)
        self._check(body.model)
        prompt = self._prompt(body)
        special = body.add_special_tokens is not False
        told = await self._queries.ask(lambda uid: EncodeRequest(uid, prompt, add_special_tokens=special))
        assert isinstance(told, Encoded)
        tokens = np.frombuffer(told.token_ids, dtype=Wire.TOKEN).tolist()
        return {
            "count": len(tokens),
            "max_model_len": self._model.max_model_len,
            "tokens": tokens,
            "token_strs": told.texts if body.return_token_strs else None,
        }

    async def detokenize(self, raw: bytes) -> dict[str, object]:
        """The text of token ids, special ones included."""
        body = parse(DetokenizeBody, raw)
        self._check(body.model)
        told = await self._queries.ask(lambda uid: DecodeRequest(uid, body.tokens))
        assert isinstance(told, Decoded)
        return {"prompt": told.text}

    def _check(self, name: str | None) -> None:
        if name is not None:
            self._model.check_name(name)

    def _prompt(self, body: TokenizeBody) -> str | ChatPrompt:
        if body.prompt is not None:
            return body.prompt
        fields = body.model_fields_set & (_CHAT_FIELDS | {"messages"})
        chat = ChatRequest.model_construct(
            _fields_set=set(fields), model=self._model.name, **{name: getattr(body, name) for name in fields}
        )
        return chat_prompt(chat)
