"""Encoding by the fastokens package, several times as fast as tokenizers, where it gives the same ids.

It is a rewrite, not a binding, so it is trusted with a model only after both have encoded the same probe: prose
in several scripts, code, numbers, runs of white space, every added token, and seeded mixtures of all of these.
"""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from skiff_runtime import log
from skiff_runtime.errors import ConfigError
from skiff_runtime.vocabulary.probe_texts import PROBE

EncodeText = Callable[[str, bool], NDArray[np.int64]]
"""Text, and whether the tokenizer's own special tokens are added -> ids int64[T]."""

MIXTURES: Final = 400
MIXTURE_PIECES: Final = 12
_SEED: Final = 0


def load_fastokens_encoder(path: Path, tokenizer: Tokenizer) -> EncodeText | None:
    """The encoding of ``path`` (a tokenizer.json) by fastokens; None, with a line in the log, where it differs.

    Raises ``ConfigError`` where the package is missing.
    """
    try:
        import fastokens
    except ImportError:
        raise ConfigError(
            "--tokenizer-backend fastokens needs the package fastokens: in Skiff's sources, pip install '.[fast]'"
        ) from None
    try:
        fast = fastokens.Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 (the library raises nothing narrower)
        log.warning("fastokens_rejected", reason=f"it cannot read this tokenizer: {error}")
        return None

    def encode(text: str, add_special_tokens: bool) -> NDArray[np.int64]:
        ids, _ = fast.encode_batch_flat([text], add_special_tokens)
        return np.frombuffer(ids, dtype="<u4").astype(np.int64)

    differing = _first_difference(encode, tokenizer)
    if differing is None:
        return encode
    log.warning("fastokens_rejected", reason=f"it encodes {differing[:80]!r} differently")
    return None


def reference_encoder(tokenizer: Tokenizer) -> EncodeText:
    """The encoding by tokenizers itself."""

    def encode(text: str, add_special_tokens: bool) -> NDArray[np.int64]:
        [encoding] = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return np.array(encoding.ids, dtype=np.int64)

    return encode


def _first_difference(encode: EncodeText, tokenizer: Tokenizer) -> str | None:
    exact = reference_encoder(tokenizer)
    for text in _probe(tokenizer):
        for special in (False, True):
            try:
                same = np.array_equal(encode(text, special), exact(text, special))
            except Exception:  # noqa: BLE001 (one of the two cannot encode it)
                return text
            if not same:
                return text
    return None


def _probe(tokenizer: Tokenizer) -> Iterator[str]:
    added = [token.content for _, token in sorted(tokenizer.get_added_tokens_decoder().items())]
    yield from PROBE
    for content in added:
        yield from (content, f"a {content} b", f"a{content}b\n{content}{content}")
    choose = random.Random(_SEED)
    pieces = [piece for text in PROBE for piece in (*text.split(" "), *text[:40])] + added
    for _ in range(MIXTURES):
        drawn = choose.choices(pieces, k=choose.randint(1, MIXTURE_PIECES))
        yield choose.choice(("", " ", "\n", "  ")).join(drawn)
