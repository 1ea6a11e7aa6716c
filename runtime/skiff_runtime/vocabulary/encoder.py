"""Encoder: text to token ids, with the model's own tokenizer.json.

A prompt has BOS at most once. The text of a chat template is encoded as it is, because the template writes the BOS
that the model was trained with (as in transformers' ``apply_chat_template``; a template without BOS gets none). Plain
text gets the special tokens that the tokenizer adds. Token ids are used unchanged.
"""

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from skiff_runtime.errors import ContextTooLong, InvalidRequest, ModelError
from skiff_runtime.vocabulary.fastokens_encoder import EncodeText, reference_encoder

Int32 = NDArray[np.int32]


def load_tokenizer(path: Path) -> Tokenizer:
    """Load the tokenizer in ``path``, without the truncation and padding that it may have been saved with.

    Raises ``ModelError``.
    """
    # The library's threads would compete with the other processes; load is shared among tokenizer processes instead.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 (the library raises nothing narrower)
        raise ModelError(f"{path} cannot be read as a tokenizer: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


class Encoder:
    """Encodes prompts as token ids of the model's vocabulary, and decodes them."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        max_model_len: int,
        encode_text: EncodeText | None = None,
    ) -> None:
        """``encode_text`` replaces the tokenizer's own encoding."""
        self._tokenizer = tokenizer
        self._encode_text = encode_text or reference_encoder(tokenizer)
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        # A token covers at most as many characters as its name has, so a longer text cannot fit and is not encoded.
        longest = max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=1)
        self._max_characters = max_model_len * longest

    def encode(self, text: str, *, add_special_tokens: bool) -> Int32:
        """Return the token ids of ``text``, int32[T]. Raises ``InvalidRequest`` or ``ContextTooLong``."""
        if len(text) > self._max_characters:
            raise ContextTooLong(
                f"the prompt has {len(text)} characters, more than {self._max_model_len} tokens can hold; shorten the prompt"
            )
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidRequest(
                "the prompt contains half of a UTF-16 surrogate pair; send valid Unicode"
            ) from None
        try:
            ids = self._encode_text(text, add_special_tokens)
        except Exception as error:  # noqa: BLE001 (the library raises nothing narrower)
            raise InvalidRequest(f"the tokenizer cannot encode the prompt: {error}") from None
        return self._check(ids)

    def check_token_ids(self, token_ids: list[int]) -> Int32:
        """Return ``token_ids`` as int32[T] after checking that each is in the vocabulary. Raises ``InvalidRequest``."""
        try:
            return self._check(np.array(token_ids, dtype=np.int64))
        except OverflowError:
            raise InvalidRequest("a token id of the prompt does not fit into 64 bits") from None

    def find_token(self, text: str) -> int:
        """Return the id of the token whose text is ``text``. Raises ``InvalidRequest`` if there is no such token."""
        token = self._tokenizer.token_to_id(text)
        if token is None or token >= self._vocab_size:
            raise InvalidRequest(
                f"the model's vocabulary has no token {text!r}, by which its scores are read; serve with "
                "--rerank-template none, or another model"
            )
        return token

    def decode_each(self, ids: Int32) -> list[str]:
        """Decode each token by itself; bytes that are no whole character become U+FFFD."""
        return self._tokenizer.decode_batch([[token] for token in ids.tolist()], skip_special_tokens=False)

    def decode(self, token_ids: list[int]) -> str:
        """Decode ``token_ids``, special tokens included. Raises ``InvalidRequest`` or ``ContextTooLong``."""
        if len(token_ids) > self._max_model_len:
            raise ContextTooLong(
                f"{len(token_ids)} tokens exceed the model's context of {self._max_model_len} tokens; send fewer",
                param="tokens",
            )
        return str(
            self._tokenizer.decode(self.check_token_ids(token_ids).tolist(), skip_special_tokens=False)
        )

    def _check(self, ids: NDArray[np.int64]) -> Int32:
        """Return ``ids`` int64[T] as int32[T]. Raises ``InvalidRequest`` if one is outside of the vocabulary."""
        outside = np.flatnonzero((ids < 0) | (ids >= self._vocab_size))
        if outside.size:
            position = int(outside[0])
            raise InvalidRequest(
                f"token id {ids[position]} at position {position} of the prompt is outside the model's vocabulary "
                f"(0 to {self._vocab_size - 1})"
            )
        return ids.astype(np.int32)
