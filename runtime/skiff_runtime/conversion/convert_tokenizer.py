"""The child process that converts one model's tokenizer: ``python -m skiff_runtime.conversion.convert_tokenizer MODEL SOURCE TARGET``.

transformers converts. The result is compared with the library that reads the source format, and rejected if it encodes
or decodes any of the probe texts differently: with other tokens the model would answer nonsense, and no error would show
it. Code from a model's repository is never run.
"""

import base64
import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer, decoders, normalizers

from skiff_runtime.conversion.gguf_vocabulary import GgufVocabulary
from skiff_runtime.errors import ModelError
from skiff_runtime.gguf.header import is_gguf
from skiff_runtime.vocabulary.probe_texts import PROBE_TEXTS

_SPACE: Final = "\u2581"
_TIKTOKEN_NAME: Final = "tiktoken.model"
_TEKKEN_NAME: Final = "tekken.json"
_USER_DEFINED: Final = 4
"""SentencePiece's type of a piece that is never split."""


@dataclass(frozen=True, slots=True)
class ReferenceTokenizer:
    """The tokenizer of the library that reads the source format."""

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]


class ConversionError(Exception):
    """The files are malformed, or a package is missing. The message names the remedy."""


def main() -> int:
    """Convert, or write one line with the reason to standard error."""
    model, source, target = map(Path, sys.argv[1:])
    try:
        convert(model, source, target)
    except (ConversionError, ModelError) as error:
        print(error, file=sys.stderr)
        return 1
    except Exception as error:  # noqa: BLE001 (the process ends here, and transformers may raise anything)
        print(f"{type(error).__name__}: {' '.join(str(error).split())[:500]}", file=sys.stderr)
        return 1
    return 0


def convert(model: Path, source: Path, target: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json into ``target``. Raises ``ConversionError`` or ``ModelError``."""
    if is_gguf(source):
        _convert_gguf(GgufVocabulary(source), target)
    elif source.name == _TEKKEN_NAME:
        _require("tiktoken")
        _save(_load_staged(model, source, source.name), target, _tekken(source))
    elif _is_tiktoken(source):
        _require("tiktoken")
        _check_special_tokens(model, source)
        _save(_load_staged(model, source, _TIKTOKEN_NAME), target, _tiktoken(source))
    elif source.suffix == ".model":
        _require("sentencepiece", "google.protobuf")
        _convert_sentencepiece(model, source, target)
    else:
        _save(_load_staged(model, source, source.name), target, None)


def _convert_gguf(vocabulary: GgufVocabulary, target: Path) -> None:
    """Convert the vocabulary in a GGUF file, with its chat template."""
    if vocabulary.is_sentencepiece:
        _require("sentencepiece", "google.protobuf")
        with tempfile.TemporaryDirectory() as staged:
            _convert_sentencepiece(Path(staged), vocabulary.stage_sentencepiece(Path(staged)), target)
    else:
        vocabulary.build_byte_level().save(str(target / "tokenizer.json"))
    vocabulary.check(Tokenizer.from_file(str(target / "tokenizer.json")))
    vocabulary.write_settings(target)


def _convert_sentencepiece(model: Path, source: Path, target: Path) -> None:
    """Save the first of transformers' conversions that encodes like SentencePiece.

    The generic conversion omits the space that SentencePiece puts before a text, and Llama's drops a space that the text
    begins with, so each is tried as it is, with another normalizer, and for models that add no space.
    """
    reference, user_defined = _sentencepiece(source)
    is_llama = str(_read_config(model).get("tokenizer_class", "Llama")).startswith("Llama")
    failure: ConversionError | None = None
    for load in (_load_llama, _load_staged) if is_llama else (_load_staged, _load_llama):
        tokenizer = load(model, source, source.name)
        _add_user_defined(tokenizer, user_defined)
        for adapt in (None, _prepend_space, _add_no_space):
            if adapt is not None:
                adapt(tokenizer)
            try:
                _save(tokenizer, target, reference)
            except ConversionError as error:
                failure = failure or error
            else:
                return
    assert failure is not None
    raise failure


def _load_staged(model: Path, source: Path, name: str) -> Any:
    """Load the tokenizer with transformers' choice of class, from a directory where the source has the expected ``name``."""
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as staged:
        for path in model.iterdir():
            if path.is_file() and path.suffix in (".json", ".txt", ".jinja") and path.name != _TEKKEN_NAME:
                (Path(staged) / path.name).symlink_to(path.resolve())
        (Path(staged) / name).symlink_to(source.resolve())
        return AutoTokenizer.from_pretrained(staged, trust_remote_code=False, local_files_only=True)


def _load_llama(model: Path, source: Path, name: str) -> Any:
    from transformers import LlamaTokenizer

    config = _read_config(model)
    with tempfile.TemporaryDirectory() as staged:
        for path in (source, model / "tokenizer_config.json", model / "special_tokens_map.json"):
            if path.is_file():
                (Path(staged) / path.name).symlink_to(path.resolve())
        return LlamaTokenizer.from_pretrained(
            staged,
            local_files_only=True,
            add_bos_token=config.get("add_bos_token", True),
            add_eos_token=config.get("add_eos_token", False),
        )


def _prepend_space(tokenizer: Any) -> None:
    """Put a space before every text, as SentencePiece does with ``add_dummy_prefix``."""
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = None
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])


def _add_no_space(tokenizer: Any) -> None:
    """Neither add a space before a text nor strip one from it, as SentencePiece does without ``add_dummy_prefix``."""
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = None
    backend.normalizer = normalizers.Replace(" ", _SPACE)
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )


def _add_user_defined(tokenizer: Any, pieces: list[str]) -> None:
    """Add the user-defined pieces that transformers' conversion has dropped."""
    known = {token.content for token in tokenizer.backend_tokenizer.get_added_tokens_decoder().values()}
    missing = [AddedToken(piece, normalized=False) for piece in pieces if piece not in known]
    if missing:
        tokenizer.backend_tokenizer.add_tokens(missing)


def _save(tokenizer: Any, target: Path, reference: ReferenceTokenizer | None) -> None:
    """Save the tokenizer. Raises ``ConversionError`` if it encodes or decodes any probe text unlike ``reference``."""
    tokenizer.save_pretrained(target)
    saved = Tokenizer.from_file(str(target / "tokenizer.json"))
    added = [token.content for token in saved.get_added_tokens_decoder().values()]
    for text in PROBE_TEXTS:
        if reference is None or any(content in text for content in added):
            continue  # no reference, or a text with a special token, which only one of the two may know
        ids = saved.encode(text, add_special_tokens=False).ids
        if ids != reference.encode(text):
            raise ConversionError(f"transformers' conversion encodes {text[:60]!r} differently")
        if saved.decode(ids) != reference.decode(ids):
            raise ConversionError(f"transformers' conversion decodes {text[:60]!r} differently")


def _sentencepiece(source: Path) -> tuple[ReferenceTokenizer, list[str]]:
    """Return SentencePiece's own tokenizer, and its user-defined pieces, which it never splits."""
    from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2

    try:
        processor = SentencePieceProcessor(model_file=str(source))
    except (RuntimeError, OSError):
        raise ConversionError("it is neither a SentencePiece model nor a tiktoken vocabulary") from None
    proto = sentencepiece_model_pb2.ModelProto.FromString(source.read_bytes())  # type: ignore[attr-defined]
    user_defined = [piece.piece for piece in proto.pieces if piece.type == _USER_DEFINED]
    return ReferenceTokenizer(processor.encode, processor.decode), user_defined


def _tiktoken(source: Path) -> ReferenceTokenizer:
    from tiktoken import Encoding
    from tiktoken.load import load_tiktoken_bpe

    from skiff_runtime.conversion.transformers_internals import TikTokenConverter

    ranks = load_tiktoken_bpe(str(source))
    pattern = TikTokenConverter().pattern
    plain = Encoding(source.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    return ReferenceTokenizer(plain.encode_ordinary, plain.decode)


def _tekken(source: Path) -> ReferenceTokenizer:
    """Return tiktoken's tokenizer with the same tokens; in tekken their ids follow those of the special tokens."""
    from tiktoken import Encoding

    file = json.loads(source.read_text())
    config = file["config"]
    special = int(config["default_num_special_tokens"])
    entries = file["vocab"][: config["default_vocab_size"] - special]
    ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in entries}
    plain = Encoding(source.name, pat_str=config["pattern"], mergeable_ranks=ranks, special_tokens={})
    return ReferenceTokenizer(
        encode=lambda text: [special + token for token in plain.encode_ordinary(text)],
        decode=lambda ids: plain.decode([token - special for token in ids]),
    )


def _is_tiktoken(source: Path) -> bool:
    """Return whether the first line is a base64 token and its rank, as in a tiktoken vocabulary."""
    with source.open("rb") as stream:
        words = stream.readline(4096).split()
    return len(words) == 2 and words[1].isdigit() and source.suffix in (".model", ".tiktoken")


def _check_special_tokens(model: Path, source: Path) -> None:
    """Raise ``ConversionError`` if no file names the special tokens: a chat would encode them as plain text."""
    config = _read_config(model)
    has_names = any(
        config.get(key)
        for key in ("added_tokens_decoder", "extra_special_tokens", "additional_special_tokens")
    )
    size = json.loads((model / "config.json").read_text()).get("vocab_size", 0)
    with source.open("rb") as stream:
        num_plain = sum(1 for line in stream if line.strip())
    if not has_names and size > num_plain:
        raise ConversionError(
            f"it has {num_plain} of the model's {size} tokens, and no tokenizer_config.json names the special tokens "
            "(added_tokens_decoder); copy that file from the model's repository"
        )


def _read_config(model: Path) -> dict[str, Any]:
    path = model / "tokenizer_config.json"
    config: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return config


def _require(*modules: str) -> None:
    for module in modules:
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            found = None
        if found is None:
            package = {"google.protobuf": "protobuf"}.get(module, module)
            raise ConversionError(f"this needs the package {package}: pip install {package}")


if __name__ == "__main__":
    sys.exit(main())
