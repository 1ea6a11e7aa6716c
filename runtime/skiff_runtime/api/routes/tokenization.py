"""POST /tokenize and /detokenize: the model's tokenizer over HTTP, in vLLM's formats."""

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
from skiff_runtime.api.routes.openapi import error_responses
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
    """Body of POST /tokenize: a text in ``prompt``, or a conversation in ``messages`` with fields of the chat endpoint.

    ``add_special_tokens`` applies to a text; the chat template adds those of a conversation.
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
    def _has_one_input(self) -> Self:
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
    """Body of POST /detokenize."""

    model: ModelName | None = None
    tokens: TokenIds


class TokenizeResponse(BaseModel):
    """Token IDs of a prompt."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeResponse(BaseModel):
    """Text of token IDs."""

    prompt: str


_ERROR_RESPONSES: Final = error_responses(400, 404, 408, 413, 429, 500, 503)


def make_tokenization_routes(model: ServedModel, rpc: RpcClient) -> APIRouter:
    """Return the operations of the tokenizer."""
    router = APIRouter(tags=["tokens"], route_class=BoundedRoute, responses=_ERROR_RESPONSES)

    @router.post(contract.PATH_TOKENIZE, summary="Tokenize a prompt")
    async def tokenize(body: JsonBody[TokenizeBody]) -> TokenizeResponse:
        """Return the token IDs of a text or of a conversation, as a generation request would compute them."""
        model.choose(body.model)
        prompt = _build_prompt(body, model.name)
        special = body.add_special_tokens is not False
        texts = bool(body.return_token_strs)
        encoded = await rpc.call(
            lambda uid: EncodeRequest(uid, prompt, add_special_tokens=special, with_texts=texts)
        )
        assert isinstance(encoded, Encoded)
        tokens = np.frombuffer(encoded.token_ids, dtype=Wire.TOKEN).tolist()
        return TokenizeResponse(
            count=len(tokens),
            max_model_len=model.max_model_len,
            tokens=tokens,
            token_strs=encoded.texts if texts else None,
        )

    @router.post(contract.PATH_DETOKENIZE, summary="Detokenize token IDs")
    async def detokenize(body: JsonBody[DetokenizeBody]) -> DetokenizeResponse:
        """Return the text of token IDs, with special tokens."""
        model.choose(body.model)
        decoded = await rpc.call(lambda uid: DecodeRequest(uid, body.tokens))
        assert isinstance(decoded, Decoded)
        return DetokenizeResponse(prompt=decoded.text)

    return router


def _build_prompt(body: TokenizeBody, model: str) -> str | ChatPrompt:
    if body.prompt is not None:
        return body.prompt
    fields = body.model_fields_set & (_CHAT_FIELDS | {"messages"})
    chat = ChatCompletionRequest.model_construct(
        _fields_set=set(fields), model=model, **{name: getattr(body, name) for name in fields}
    )
    return build_chat_prompt(chat)
