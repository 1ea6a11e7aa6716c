"""Text to token ids, with the model's own tokenizer.json.

BOS exactly once: the text of a chat template is encoded as it stands, for the template writes what the model
was trained on (as transformers' ``apply_chat_template`` does, so a template that writes no BOS gets none);
plain text gets the tokenizer's own special tokens; token ids are taken as they come.
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
    """The tokenizer in ``path``, without the truncation and padding it may have been saved with.

    It works in the calling thread alone: processes, not threads, share the work.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 (the library raises nothing narrower)
        raise ModelError(f"{path} cannot be read as a tokenizer: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


class Encoder:
    """Turns prompts into token ids within the model's vocabulary."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        max_model_len: int,
        encode_text: EncodeText | None = None,
    ) -> None:
        """``encode_text`` stands in for the tokenizer's own encoding."""
        self._tokenizer = tokenizer
        self._encode_text = encode_text or reference_encoder(tokenizer)
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        longest = max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=1)
        self._max_characters = max_model_len * longest

    def encode(self, text: str, *, add_special_tokens: bool) -> Int32:
        """Token ids int32[T] of ``text``. Raises ``InvalidRequest`` or ``ContextTooLong``."""
        if len(text) > self._max_characters:
            raise ContextTooLong(
                f"the prompt has {len(text)} characters, more than {self._max_model_len} tokens can hold; shorten it"
            )
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidRequest(
                "the prompt holds half of a UTF-16 surrogate pair; send valid Unicode"
            ) from None
        try:
            ids = self._encode_text(text, add_special_tokens)
        except Exception as error:  # noqa: BLE001 (the library raises nothing narrower; one request must not end all)
            raise InvalidRequest(f"the tokenizer cannot encode the prompt: {error}") from None
        return self._checked(ids)

    def check(self, token_ids: list[int]) -> Int32:
        """``token_ids`` as int32[T], each within the vocabulary. Raises ``InvalidRequest``."""
        try:
            return self._checked(np.array(token_ids, dtype=np.int64))
        except OverflowError:
            raise InvalidRequest("a token id of the prompt does not fit 64 bits") from None

    def pieces(self, ids: Int32) -> list[str]:
        """What each token writes by itself; bytes that are no whole character show as U+FFFD."""
        return self._tokenizer.decode_batch([[token] for token in ids.tolist()], skip_special_tokens=False)

    def decode(self, token_ids: list[int]) -> str:
        """The text of ``token_ids``, special tokens included. Raises ``InvalidRequest`` or ``ContextTooLong``."""
        if len(token_ids) > self._max_model_len:
            raise ContextTooLong(
                f"{len(token_ids)} tokens are more than the model's context of {self._max_model_len}; send fewer",
                param="tokens",
            )
        return str(self._tokenizer.decode(self.check(token_ids).tolist(), skip_special_tokens=False))

    def _checked(self, ids: NDArray[np.int64]) -> Int32:
        outside = np.flatnonzero((ids < 0) | (ids >= self._vocab_size))
        if outside.size:
            position = int(outside[0])
            raise InvalidRequest(
                f"token id {ids[position]} at position {position} of the prompt is not from 0 to "
                f"{self._vocab_size - 1}, the model's vocabulary"
            )
        return ids.astype(np.int32)
