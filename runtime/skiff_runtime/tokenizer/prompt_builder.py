"""Prompt builder: turns a request of the API into a request of the scheduler (render, encode, check the length)."""

from dataclasses import dataclass

from msgspec.structs import replace

from skiff_runtime.config.limits import MAX_BAD_WORD_TOKENS
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
        options, sampling = request.options, request.sampling
        ids = self._encode_prompt(request.prompt, options.add_special_tokens)
        if options.truncate_prompt_tokens:
            ids = self._truncate(ids, options.truncate_prompt_tokens, sampling.max_tokens)
        if request.pooling is None:
            self._check_length(ids.size, 0 if sampling.fits_context else sampling.max_tokens)
        else:
            self._check_pooled_length(ids.size)
        if options.bad_words:
            sampling = replace(sampling, bad_words=self._encode_bad_words(options.bad_words))
        return GenerateRequest(
            uid=request.uid,
            token_ids=_to_bytes(ids),
            sampling=sampling,
            text=request.text,
            priority=request.priority,
            cache_salt=request.cache_salt,
            pooling=None if request.pooling is None else self._find_labels(request.pooling),
            # A prompt whose beginning is cut off has none of the blocks of its text.
            prompt_blocks=None if options.truncate_prompt_tokens else request.prompt_blocks,
            adapter_id=request.adapter_id,
        )

    def encode(self, request: EncodeRequest) -> Encoded:
        """Encode a prompt. Special tokens are added to plain text only, because a chat template writes its own."""
        if isinstance(request.prompt, ChatPrompt):
            ids = self._encode_prompt(request.prompt)
        else:
            ids = self.encoder.encode(request.prompt, add_special_tokens=request.add_special_tokens)
        texts = self.encoder.decode_each(ids) if request.with_texts else []
        return Encoded(uid=request.uid, token_ids=_to_bytes(ids), texts=texts)

    def decode(self, request: DecodeRequest) -> Decoded:
        """Decode token ids to text, special tokens included."""
        return Decoded(uid=request.uid, text=self.encoder.decode(request.token_ids))

    def _encode_prompt(
        self, prompt: str | list[int] | ChatPrompt, add_special_tokens: bool | None = None
    ) -> Int32:
        if isinstance(prompt, list):
            return self.encoder.check_token_ids(prompt)
        if isinstance(prompt, str):
            return self.encoder.encode(prompt, add_special_tokens=add_special_tokens is not False)
        return self.encoder.encode(self.template.render(prompt), add_special_tokens=bool(add_special_tokens))

    def _truncate(self, ids: Int32, limit: int, max_tokens: int) -> Int32:
        """Keep the last ``limit`` tokens; with -1, as many as leave room for the output, or for one token of it."""
        if limit < 0:
            limit = self.max_model_len - max(1, max_tokens)
        return ids[-limit:] if limit > 0 else ids

    def _encode_bad_words(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the token sequences of each word: at the beginning of a text, and after a blank.

        The second counts where the tokenizer joins the blank to the first token of the word. Where the blank is a token
        of its own, the first sequence covers it.
        """
        sequences: dict[tuple[int, ...], None] = {}
        for word in words:
            first, after_blank = (
                tuple(self.encoder.encode(prefix + word.lstrip(), add_special_tokens=False).tolist())
                for prefix in ("", " ")
            )
            if not first:
                raise InvalidRequest(
                    "'bad_words' contains a word without a token; remove it", param="bad_words"
                )
            sequences[first] = None
            if len(after_blank) == len(first) and after_blank[0] != first[0]:
                sequences[after_blank] = None
        count = sum(map(len, sequences))
        if count > MAX_BAD_WORD_TOKENS:
            raise InvalidRequest(
                f"'bad_words' has {count} tokens, with and without a blank before each word; send at most "
                f"{MAX_BAD_WORD_TOKENS}",
                param="bad_words",
            )
        return tuple(sequences)

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
