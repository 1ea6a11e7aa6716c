"""The tokenizer in a GGUF file's metadata: a vocabulary, its merges or scores, and the name of its pre-tokenizer.

A byte-level vocabulary (``gpt2``) becomes a tokenizer.json directly. GGUF gives its pre-tokenizer, the expression that
splits a text into words, only by a name of llama.cpp's; an unknown name is refused, because with another expression the
model would get other tokens. transformers replaces names that it does not know by GPT-2's expression. A SentencePiece
vocabulary (``llama``) is written as the ``tokenizer.model`` that it was made from, and converted like one.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from skiff_runtime.errors import ModelError
from skiff_runtime.gguf.header import quote_value, read_header

_PREFIX: Final = "tokenizer.ggml."
_ARRAYS: Final = tuple(f"{_PREFIX}{name}" for name in ("tokens", "scores", "token_type", "merges"))
_TEMPLATE: Final = "tokenizer.chat_template"
_NORMAL: Final = 1
_CONTROL: Final = 3
_USER_DEFINED: Final = 4
_NAMED_TOKENS: Final = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}

_LLAMA3_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_TEKKEN_WORDS: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """The split of a text into words in one family, before merges are applied in each.

    ``words``: the expression of a word; None for GPT-2's. ``ignore_merges``: a word that is a token stays whole, by
    whichever merges it could be reached. ``adds_bos``: BOS before a text where the file does not say.
    """

    words: str | None = None
    single_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False


_LLAMA3: Final = PreTokenizer(_LLAMA3_WORDS, ignore_merges=True, adds_bos=True)
PRE_TOKENIZERS: Final = {
    "gpt-2": PreTokenizer(),
    "smollm": PreTokenizer(single_digits=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "qwen2": PreTokenizer(_QWEN2_WORDS, nfc=True),
    "deepseek-r1-qwen": PreTokenizer(_QWEN2_WORDS),
    "tekken": PreTokenizer(_TEKKEN_WORDS, ignore_merges=True, adds_bos=True),
}
"""By the names in ``tokenizer.ggml.pre``."""


class GgufVocabulary:
    """The tokenizer of one GGUF file. Every error is a ``ModelError`` that names the key."""

    def __init__(self, path: Path) -> None:
        header = read_header(path, _ARRAYS)
        self._path = path
        self._values = header.metadata
        self._model: str = self._value("model", str)
        if self._model not in ("gpt2", "llama"):
            raise self._error(
                "model", f"{quote_value(self._model)} is not supported; supported are 'gpt2' and 'llama'"
            )
        self._tokens = self._list("tokens", str)
        self._types = self._list("token_type", int) or [_NORMAL] * len(self._tokens)
        if not self._tokens or len(self._types) != len(self._tokens):
            raise self._error("tokens", "must be as many as there are token types, and at least one")

    @property
    def is_sentencepiece(self) -> bool:
        """True for a SentencePiece vocabulary, False for a byte-level one."""
        return self._model == "llama"

    def build_byte_level(self) -> Tokenizer:
        """Return the tokenizer of a byte-level vocabulary."""
        pre = self._pre_tokenizer()
        vocab = {token: number for number, token in enumerate(self._tokens)}
        merges = [tuple(merge.split(" ")) for merge in self._list("merges", str)]
        if not all(len(merge) == 2 for merge in merges):
            raise self._error("merges", "must be pairs of tokens")
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.ignore_merges))
        steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if pre.single_digits else []
        if pre.words is not None:
            steps.append(pre_tokenizers.Split(Regex(pre.words), behavior="isolated"))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.words is None))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
        if pre.nfc:
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(self._added(_CONTROL))
        tokenizer.add_tokens(self._added(_USER_DEFINED))
        self._add_bos_and_eos(tokenizer, adds_bos=pre.adds_bos)
        return tokenizer

    def stage_sentencepiece(self, directory: Path) -> Path:
        """Write a SentencePiece vocabulary as ``tokenizer.model`` with its settings into ``directory``; return its path."""
        from sentencepiece import sentencepiece_model_pb2

        proto: Any = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
        scores = self._list("scores", float) or [0.0] * len(self._tokens)
        if len(scores) != len(self._tokens):
            raise self._error("scores", "must be as many as there are tokens")
        for token, score, kind in zip(self._tokens, scores, self._types, strict=True):
            proto.pieces.add(piece=token, score=score, type=kind)
        proto.trainer_spec.model_type = proto.trainer_spec.BPE
        proto.trainer_spec.byte_fallback = True
        proto.trainer_spec.vocab_size = len(self._tokens)
        named = self.special_tokens()
        for name, piece in (
            ("bos_token", "bos_piece"),
            ("eos_token", "eos_piece"),
            ("unk_token", "unk_piece"),
        ):
            if name in named:
                setattr(proto.trainer_spec, piece, named[name])
        proto.normalizer_spec.name = "identity"
        proto.normalizer_spec.add_dummy_prefix = self._flag("add_space_prefix", True)
        proto.normalizer_spec.remove_extra_whitespaces = self._flag("remove_extra_whitespaces", False)
        path = directory / "tokenizer.model"
        path.write_bytes(proto.SerializeToString())
        (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))
        added = {
            str(number): {"content": token, "special": True, "normalized": False}
            for number, (token, kind) in enumerate(zip(self._tokens, self._types, strict=True))
            if kind == _CONTROL
        }
        settings = {
            "tokenizer_class": "LlamaTokenizer",
            "add_bos_token": self._flag("add_bos_token", True),
            "add_eos_token": self._flag("add_eos_token", False),
            "added_tokens_decoder": added,
            **named,
        }
        (directory / "tokenizer_config.json").write_text(json.dumps(settings))
        return path

    def write_settings(self, directory: Path) -> None:
        """Write the names of the special tokens, and the chat template if there is one."""
        (directory / "tokenizer_config.json").write_text(json.dumps(self.special_tokens()))
        template = self._values.get(_TEMPLATE)
        if isinstance(template, str):
            (directory / "chat_template.jinja").write_text(template)

    def check(self, tokenizer: Tokenizer) -> None:
        """Raise ``ModelError`` if a token has another id in ``tokenizer``: the model would read another one."""
        for number, token in enumerate(self._tokens):
            if tokenizer.id_to_token(number) != token:
                found = tokenizer.id_to_token(number)
                raise self._error(
                    "tokens",
                    f"token {number} is {quote_value(token)}, but {quote_value(found)} after the conversion",
                )

    def special_tokens(self) -> dict[str, str]:
        """Return the special tokens by their names in a tokenizer_config.json."""
        named = {}
        for name, key in _NAMED_TOKENS.items():
            number = self._values.get(_PREFIX + key)
            if number is None:
                continue
            if not isinstance(number, int) or not 0 <= number < len(self._tokens):
                raise self._error(key, f"must be a token of the vocabulary, not {quote_value(number)}")
            named[name] = self._tokens[number]
        return named

    def _pre_tokenizer(self) -> PreTokenizer:
        name = self._values.get(f"{_PREFIX}pre")
        if name not in PRE_TOKENIZERS:
            raise self._error(
                "pre",
                f"{quote_value(name)} is not supported; supported are {', '.join(map(repr, PRE_TOKENIZERS))}",
            )
        return PRE_TOKENIZERS[str(name)]

    def _added(self, kind: int) -> list[AddedToken]:
        """Return the tokens of a kind, which no pre-tokenizer splits."""
        pairs = zip(self._tokens, self._types, strict=True)
        special = kind == _CONTROL
        return [AddedToken(token, normalized=False, special=special) for token, each in pairs if each == kind]

    def _add_bos_and_eos(self, tokenizer: Tokenizer, *, adds_bos: bool) -> None:
        """Let the tokenizer put BOS before and EOS behind a text, as the file or the family says."""
        named = self.special_tokens()
        bos = named.get("bos_token") if self._flag("add_bos_token", adds_bos) else None
        eos = named.get("eos_token") if self._flag("add_eos_token", False) else None
        used = [token for token in (bos, eos) if token is not None]
        if used:
            tokenizer.post_processor = processors.TemplateProcessing(
                single=[*([bos] if bos else []), "$A", *([eos] if eos else [])],
                special_tokens=[(token, self._tokens.index(token)) for token in dict.fromkeys(used)],
            )

    def _value(self, name: str, kind: type) -> Any:
        value = self._values.get(_PREFIX + name)
        if not isinstance(value, kind):
            raise self._error(name, f"must be of type {kind.__name__}, not {quote_value(value)}")
        return value

    def _flag(self, name: str, default: bool) -> bool:
        value = self._values.get(_PREFIX + name, default)
        if not isinstance(value, bool):
            raise self._error(name, f"must be true or false, not {quote_value(value)}")
        return value

    def _list(self, name: str, kind: type) -> Sequence[Any]:
        """Return an array's elements, all of one type; none if it is absent."""
        value = self._values.get(_PREFIX + name, [])
        if not isinstance(value, list) or not all(type(each) is kind for each in value):
            raise self._error(name, f"must be an array of {kind.__name__}")
        return value

    def _error(self, name: str, problem: str) -> ModelError:
        return ModelError(f"GGUF file {self._path}: '{_PREFIX}{name}' {problem}")
