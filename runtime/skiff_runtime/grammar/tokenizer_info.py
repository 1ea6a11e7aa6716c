"""The vocabulary in the form that xgrammar needs: the bytes of each token, and the tokens that end an answer.

The compiler process and every engine read it from the same files, because a grammar is compiled for exactly one
vocabulary.
"""

import xgrammar

from skiff_runtime.models.config import ModelConfig
from skiff_runtime.vocabulary.token_bytes import read_token_bytes
from skiff_runtime.vocabulary.tokenizer_files import read_tokenizer_files


def read_tokenizer_info(model: ModelConfig) -> xgrammar.TokenizerInfo:
    """Read the model's vocabulary. Raises ``ModelError``.

    A grammar constrains the text that a client sees, so special tokens have no bytes here and never match. The only
    exception is the end of sequence, which is allowed where the answer may end.
    """
    return xgrammar.TokenizerInfo(
        read_token_bytes(read_tokenizer_files(model.path, model.tokenizer_path).tokenizer, model.vocab_size),
        xgrammar.VocabType.RAW,
        vocab_size=model.vocab_size,
        stop_token_ids=[token for token in model.eos_token_ids if token < model.vocab_size],
    )
