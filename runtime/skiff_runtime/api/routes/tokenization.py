"""POST /tokenize and /detokenize: the model's tokenizer over HTTP, in vLLM's shapes."""

from typing import Annotated, Final, Self

import numpy as np
from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator
from pydantic_core import PydanticCustomError

from skiff_runtime import contract
from skiff_runtime.api.dispatch.rpc import RpcClient
from skiff_runtime.api.formats.chat_completions import build_chat_prompt
from skiff_runtime.api.formats.served_model import ServedModel
from skiff_runtime.api.routes.json_body import BoundedRoute, JsonBody
from skiff_runtime.api.routes.openapi import failures
from skiff_runtime.api.schemas.request_bodies import (
    MAX_CHAT_TEMPLATE_KWARGS,
    MAX_MESSAGES,
    ChatCompletionRequest,
    ChatMessage,
    StrictModel,
    TokenIds,
    ToolFields,
    exactly_one,
)
from skiff_runtime.messages import ChatPrompt, Decoded, DecodeRequest, Encoded, EncodeRequest, Wire

ModelName = Annotated[str, Field(min_length=1, max_length=512)]


class TokenizeBody(ToolFields):
    """POST /tokenize: a text in ``prompt``, or a conversation in ``messages`` with what the chat endpoint takes beside.

    ``add_special_tokens`` is for a text; a conversation's template writes its own.
    """

    model_config = ConfigDict(json_schema_extra=exactly_one("prompt", "messages"))

    model: ModelName | None = None
    prompt: str | None = None
    messages: (
        Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | None
    ) = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: (
        Annotated[dict[str, JsonValue], Field(max_length=MAX_CHAT_TEMPLATE_KWARGS)] | None
    ) = None

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


class DetokenizeBody(StrictModel):
    """POST /detokenize."""

    model: ModelName | None = None
    tokens: TokenIds


class TokenizeResponse(BaseModel):
    """Token ids of a prompt."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeResponse(BaseModel):
    """The text of token ids."""

    prompt: str


_ERRORS: Final = failures(400, 404, 408, 413, 429, 500, 503)


def make_tokenization_routes(model: ServedModel, queries: RpcClient) -> APIRouter:
    """Return the operations."""
    router = APIRouter(tags=["tokens"], route_class=BoundedRoute, responses=_ERRORS)

    @router.post(contract.PATH_TOKENIZE, summary="Tokenize a prompt")
    async def tokenize(body: JsonBody[TokenizeBody]) -> TokenizeResponse:
        """Return the token ids of a text or of a conversation, as they would be computed."""
        model.check_model_name(body.model)
        prompt = _prompt(body, model.name)
        special = body.add_special_tokens is not False
        encoded = await queries.ask(lambda uid: EncodeRequest(uid, prompt, add_special_tokens=special))
        assert isinstance(encoded, Encoded)
        tokens = np.frombuffer(encoded.token_ids, dtype=Wire.TOKEN).tolist()
        return TokenizeResponse(
            count=len(tokens),
            max_model_len=model.max_model_len,
            tokens=tokens,
            token_strs=encoded.texts if body.return_token_strs else None,
        )

    @router.post(contract.PATH_DETOKENIZE, summary="Detokenize token ids")
    async def detokenize(body: JsonBody[DetokenizeBody]) -> DetokenizeResponse:
        """Return the text of token ids, special ones included."""
        model.check_model_name(body.model)
        decoded = await queries.ask(lambda uid: DecodeRequest(uid, body.tokens))
        assert isinstance(decoded, Decoded)
        return DetokenizeResponse(prompt=decoded.text)

    return router


def _prompt(body: TokenizeBody, model: str) -> str | ChatPrompt:
    if body.prompt is not None:
        return body.prompt
    fields = body.model_fields_set & (_CHAT_FIELDS | {"messages"})
    chat = ChatCompletionRequest.model_construct(
        _fields_set=set(fields), model=model, **{name: getattr(body, name) for name in fields}
    )
    return build_chat_prompt(chat)
