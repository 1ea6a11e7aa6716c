"""From a request of the API to a request of the scheduler: render, encode, check the length."""

from dataclasses import dataclass

from skiff_runtime.errors import ContextTooLong, InvalidRequest
from skiff_runtime.messages import (
    ChatPrompt,
    Decoded,
    DecodeRequest,
    Encoded,
    EncodeRequest,
    GenerateRequest,
    SamplingSpec,
    TokenizeRequest,
    Wire,
)
from skiff_runtime.vocabulary.chat_template import ChatTemplate
from skiff_runtime.vocabulary.encoder import Encoder, Int32


@dataclass(frozen=True, slots=True)
class PromptBuilder:
    """Everything that turning a prompt into tokens needs. ``max_model_len`` counts prompt and output."""

    template: ChatTemplate
    encoder: Encoder
    max_model_len: int

    def build(self, request: TokenizeRequest) -> GenerateRequest:
        """The first copy that ``request`` asks for. Raises ``RequestError`` where it cannot be served."""
        ids = self._token_ids(request.prompt)
        return GenerateRequest(
            uid=request.uid,
            token_ids=_column(ids),
            sampling=self._fitting(ids.size, request.sampling),
            text=request.text,
            priority=request.priority,
            cache_salt=request.cache_salt,
        )

    def encode(self, request: EncodeRequest) -> Encoded:
        """A prompt's token ids. Special tokens are added to a plain text only: a template writes its own."""
        if isinstance(request.prompt, ChatPrompt):
            ids = self._token_ids(request.prompt)
        else:
            ids = self.encoder.encode(request.prompt, add_special_tokens=request.add_special_tokens)
        return Encoded(uid=request.uid, token_ids=_column(ids), texts=self.encoder.pieces(ids))

    def decode(self, request: DecodeRequest) -> Decoded:
        """The text of token ids, special tokens included."""
        return Decoded(uid=request.uid, text=self.encoder.decode(request.token_ids))

    def _token_ids(self, prompt: str | list[int] | ChatPrompt) -> Int32:
        if isinstance(prompt, str):
            return self.encoder.encode(prompt, add_special_tokens=True)
        if isinstance(prompt, list):
            return self.encoder.check(prompt)
        return self.encoder.encode(self.template.render(prompt), add_special_tokens=False)

    def _fitting(self, prompt_tokens: int, sampling: SamplingSpec) -> SamplingSpec:
        """``sampling``, whose ``max_tokens`` the context has room for; 0 stays, for the scheduler to fill in."""
        if prompt_tokens == 0:
            raise InvalidRequest("the prompt is empty; send at least one token")
        room = self.max_model_len - prompt_tokens
        if room < 1:
            raise ContextTooLong(
                f"the prompt has {prompt_tokens} tokens, but the model's context holds {self.max_model_len} tokens "
                "of prompt and output together; shorten the prompt"
            )
        if sampling.max_tokens > room:
            raise ContextTooLong(
                f"{prompt_tokens} tokens of prompt and {sampling.max_tokens} of output exceed the model's context "
                f"of {self.max_model_len} tokens; shorten the prompt, or ask for at most {room} tokens",
                param="max_tokens",
            )
        return sampling


def _column(ids: Int32) -> bytes:
    return ids.astype(Wire.TOKEN, copy=False).tobytes()
