"""Encoding by the fastokens package: several times as fast as tokenizers, and used only if it yields the same ids.

fastokens is a rewrite of tokenizers, not a binding. So a model is encoded with it only after both libraries agreed on a
set of probe texts: prose in several scripts, code, numbers, runs of white space, every added token, and seeded mixtures
of all of these.
"""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from skiff_runtime import log
from skiff_runtime.config import AUTO, TokenizerBackend
from skiff_runtime.errors import ConfigError
from skiff_runtime.vocabulary.probe_texts import PROBE_TEXTS

EncodeText = Callable[[str, bool], NDArray[np.int64]]
"""(text, add_special_tokens) -> token ids int64[T]."""

NUM_MIXTURES: Final = 400
MAX_MIXTURE_PIECES: Final = 12
_SEED: Final = 0
_MAX_LOGGED_CHARACTERS: Final = 200


def choose_encoder(backend: TokenizerBackend, path: Path, tokenizer: Tokenizer) -> EncodeText:
    """Return the encoding of ``path``, a tokenizer.json, by the library of ``--tokenizer-backend``, and log the choice.

    ``auto`` and ``fastokens`` choose fastokens where it encodes as ``tokenizer`` does, and tokenizers elsewhere.

    Raises:
        ConfigError: ``backend`` is fastokens, and the package is not installed.
    """
    if backend == "tokenizers":
        return _log_choice(reference_encoder(tokenizer), "tokenizers", "--tokenizer-backend")
    try:
        encode = _load_fastokens(path, tokenizer)
    except ImportError as error:
        if backend == "fastokens":
            raise ConfigError(
                "--tokenizer-backend fastokens requires the package fastokens; install it from Skiff's sources with "
                "pip install '.[fast]'"
            ) from None
        return _log_choice(reference_encoder(tokenizer), "tokenizers", f"fastokens is not installed: {error}")
    except _Rejected as error:
        # Whoever requested it by name should learn that it is not in use.
        write = log.event if backend == AUTO else log.warning
        return _log_choice(reference_encoder(tokenizer), "tokenizers", f"fastokens {error}", write)
    return _log_choice(encode, "fastokens", "it agrees with tokenizers on the probe texts")


def _log_choice(
    encode: EncodeText, backend: str, reason: str, write: Callable[..., None] = log.event
) -> EncodeText:
    write("tokenizer_backend_chosen", backend=backend, reason=reason)
    return encode


class _Rejected(Exception):
    """Reason for which fastokens does not encode a model's prompts, as the end of a sentence about it."""


def _load_fastokens(path: Path, tokenizer: Tokenizer) -> EncodeText:
    """Load ``path``, a tokenizer.json, with fastokens.

    Raises:
        ImportError: The package is not installed, or cannot be loaded on this machine.
        _Rejected: It cannot read the file, or encodes unlike ``tokenizer``.
    """
    import fastokens

    try:
        fast = fastokens.Tokenizer.from_file(str(path))
    except BaseException as error:  # noqa: BLE001 (see _raise_unless_fault)
        _raise_unless_fault(error)
        raise _Rejected(f"cannot read this tokenizer: {error}") from None

    def encode_fast(text: str, add_special_tokens: bool) -> NDArray[np.int64]:
        ids, _ = fast.encode_batch_flat([text], add_special_tokens)
        return np.frombuffer(ids, dtype="<u4").astype(np.int64)

    text = _find_difference(encode_fast, tokenizer)
    if text is not None:
        raise _Rejected(f"encodes {text[:80]!r} differently")
    reference = reference_encoder(tokenizer)

    def encode(text: str, add_special_tokens: bool) -> NDArray[np.int64]:
        try:
            return encode_fast(text, add_special_tokens)
        except BaseException as error:  # noqa: BLE001 (see _raise_unless_fault)
            # The probe texts did not show this fault. It must neither fail the request nor end the process.
            _raise_unless_fault(error)
            log.warning("fastokens_failed", error=str(error)[:_MAX_LOGGED_CHARACTERS], characters=len(text))
            return reference(text, add_special_tokens)

    return encode


def _raise_unless_fault(error: BaseException) -> None:
    """Raise ``error`` again unless it is a fault of fastokens: an exception, or a panic of its Rust code.

    The class of a panic derives from ``BaseException``, and PyO3 exports it under no name.
    """
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error


def reference_encoder(tokenizer: Tokenizer) -> EncodeText:
    """Return the encoding by tokenizers itself."""

    def encode(text: str, add_special_tokens: bool) -> NDArray[np.int64]:
        # The fast variant computes no offsets; the library has it for batches only.
        [encoding] = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return np.array(encoding.ids, dtype=np.int64)

    return encode


def _find_difference(encode: EncodeText, tokenizer: Tokenizer) -> str | None:
    """Return the first probe text that ``encode`` encodes unlike ``tokenizer``."""
    reference = reference_encoder(tokenizer)
    for text in _probe_texts(tokenizer):
        for special in (False, True):
            try:
                same = np.array_equal(encode(text, special), reference(text, special))
            except BaseException as error:  # noqa: BLE001 (see _raise_unless_fault)
                _raise_unless_fault(error)
                return text
            if not same:
                return text
    return None


def _probe_texts(tokenizer: Tokenizer) -> Iterator[str]:
    added = [token.content for _, token in sorted(tokenizer.get_added_tokens_decoder().items())]
    yield from PROBE_TEXTS
    for content in added:
        yield from (content, f"a {content} b", f"a{content}b\n{content}{content}")
    choose = random.Random(_SEED)
    pieces = [piece for text in PROBE_TEXTS for piece in (*text.split(" "), *text[:40])] + added
    for _ in range(NUM_MIXTURES):
        drawn = choose.choices(pieces, k=choose.randint(1, MAX_MIXTURE_PIECES))
        yield choose.choice(("", " ", "\n", "  ")).join(drawn)
