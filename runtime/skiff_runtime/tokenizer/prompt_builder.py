"""Prompt builder: turns a request of the API into a request of the scheduler (render, encode, check the length)."""

from dataclasses import dataclass

from msgspec.structs import replace

from skiff_runtime.errors import ContextTooLong, InvalidRequest
from skiff_runtime.messages import (
    ChatPrompt,
    Decoded,
    DecodeRequest,
    Encoded,
    EncodeRequest,
    GenerateRequest,
    PoolingSpec,
    TokenizeRequest,
    Wire,
)
from skiff_runtime.vocabulary.chat_template import ChatTemplate
from skiff_runtime.vocabulary.encoder import Encoder, Int32


@dataclass(frozen=True, slots=True)
class PromptBuilder:
    """Chat template, encoder and context length of one model. ``max_model_len`` counts prompt and output."""

    template: ChatTemplate
    encoder: Encoder
    max_model_len: int

    def build(self, request: TokenizeRequest) -> GenerateRequest:
        """Build the first of the copies that ``request`` wants. Raises ``RequestError`` if it cannot be served."""
        ids = self._encode_prompt(request.prompt, add_special_tokens=request.add_special_tokens)
        if request.pooling is None:
            self._check_length(ids.size, request.sampling.max_tokens)
        else:
            self._check_pooled_length(ids.size)
        return GenerateRequest(
            uid=request.uid,
            token_ids=_to_bytes(ids),
            sampling=request.sampling,
            text=request.text,
            priority=request.priority,
            cache_salt=request.cache_salt,
            pooling=None if request.pooling is None else self._find_labels(request.pooling),
        )

    def encode(self, request: EncodeRequest) -> Encoded:
        """Encode a prompt. Special tokens are added to plain text only, because a chat template writes its own."""
        if isinstance(request.prompt, ChatPrompt):
            ids = self._encode_prompt(request.prompt)
        else:
            ids = self.encoder.encode(request.prompt, add_special_tokens=request.add_special_tokens)
        return Encoded(uid=request.uid, token_ids=_to_bytes(ids), texts=self.encoder.decode_each(ids))

    def decode(self, request: DecodeRequest) -> Decoded:
        """Decode token ids to text, special tokens included."""
        return Decoded(uid=request.uid, text=self.encoder.decode(request.token_ids))

    def _encode_prompt(
        self, prompt: str | list[int] | ChatPrompt, *, add_special_tokens: bool = True
    ) -> Int32:
        if isinstance(prompt, str):
            return self.encoder.encode(prompt, add_special_tokens=add_special_tokens)
        if isinstance(prompt, list):
            return self.encoder.check_token_ids(prompt)
        return self.encoder.encode(self.template.render(prompt), add_special_tokens=False)

    def _check_length(self, prompt_tokens: int, max_tokens: int) -> None:
        """Check that prompt and output fit into the context. ``max_tokens`` 0 is for the scheduler to choose."""
        _check_not_empty(prompt_tokens)
        room = self.max_model_len - prompt_tokens
        if room < 1:
            raise ContextTooLong(
                f"the prompt has {prompt_tokens} tokens, but the model's context holds {self.max_model_len} tokens "
                "of prompt and output together; shorten the prompt"
            )
        if max_tokens > room:
            raise ContextTooLong(
                f"{prompt_tokens} tokens of prompt and {max_tokens} of output exceed the model's context "
                f"of {self.max_model_len} tokens; shorten the prompt, or request at most {room} tokens",
                param="max_tokens",
            )

    def _check_pooled_length(self, prompt_tokens: int) -> None:
        """Check that a prompt without output fits into the context."""
        _check_not_empty(prompt_tokens)
        if prompt_tokens > self.max_model_len:
            raise ContextTooLong(
                f"the input has {prompt_tokens} tokens, but the model's context holds {self.max_model_len}; shorten it"
            )

    def _find_labels(self, pooling: PoolingSpec) -> PoolingSpec:
        """Return the pooling with the token ids of its labels."""
        if not pooling.labels:
            return pooling
        return replace(pooling, token_ids=tuple(map(self.encoder.find_token, pooling.labels)))


def _check_not_empty(prompt_tokens: int) -> None:
    if prompt_tokens == 0:
        raise InvalidRequest("the prompt is empty; send at least one token")


def _to_bytes(ids: Int32) -> bytes:
    return ids.astype(Wire.TOKEN, copy=False).tobytes()
