"""Small real tokenizers in formats other than tokenizer.json: SentencePiece, tiktoken, tekken."""

import base64
import io
import json
from pathlib import Path
from typing import Any, Final

import sentencepiece

_SENTENCES: Final = (
    "The small boat crosses the harbour before the morning wind begins to blow.",
    "A pod starts, a service answers, and the operator watches both of them.",
    "Grüße aus Köln, naïve café, numbers 0123456789 and code: for i in range(10): print(i)",
) * 20
TIKTOKEN_SPECIAL: Final = ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>")
_MERGES: Final = ("th", "the", " t", " the", "in", "ing", "er", " b", " bo", "at", " boat", "\n\n", "ü", "sm")
_PATTERN: Final = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def write_sentencepiece(path: Path, **options: Any) -> None:
    """Train a model like Llama 2's: BPE, byte fallback, no normalization, a space before each text."""
    written = io.BytesIO()
    chosen = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, **options}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(_SENTENCES),
        model_writer=written,
        vocab_size=420,
        model_type="bpe",
        byte_fallback=True,
        split_digits=True,
        character_coverage=0.99,
        hard_vocab_limit=False,
        minloglevel=2,
        **chosen,
    )
    path.write_bytes(written.getvalue())


def tiktoken_ranks() -> dict[bytes, int]:
    """Return a vocabulary of all single bytes and some longer tokens."""
    tokens = [bytes([byte]) for byte in range(256)] + [text.encode() for text in _MERGES]
    return {token: rank for rank, token in enumerate(tokens)}


def write_tiktoken(path: Path) -> None:
    """Write base64 tokens with their ranks, like Llama 3's ``tokenizer.model``."""
    lines = (base64.b64encode(token) + b" %d\n" % rank for token, rank in tiktoken_ranks().items())
    path.write_bytes(b"".join(lines))


def name_special_tokens(directory: Path) -> None:
    """Write the ``tokenizer_config.json`` of a model with a tiktoken vocabulary."""
    plain = len(tiktoken_ranks())
    flags = {"special": True, "normalized": False, "lstrip": False, "rstrip": False, "single_word": False}
    added = {str(plain + index): {"content": name, **flags} for index, name in enumerate(TIKTOKEN_SPECIAL)}
    begin, end, _ = TIKTOKEN_SPECIAL
    config = {"bos_token": begin, "eos_token": end, "add_bos_token": True, "added_tokens_decoder": added}
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config})
    )


def write_tekken(path: Path) -> dict[bytes, int]:
    """Write Mistral's format: a pattern, the tokens in base64, and special tokens before them. Return the ids by token."""
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<pad>", "<SPECIAL_6>", "<SPECIAL_7>"]
    ranks = tiktoken_ranks()
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for token, rank in ranks.items()
    ]
    config = {
        "pattern": _PATTERN,
        "num_vocab_tokens": len(ranks),
        "default_vocab_size": len(ranks) + len(special),
        "default_num_special_tokens": len(special),
        "version": "v3",
    }
    named = [{"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(special)]
    path.write_text(
        json.dumps(
            {"config": config, "vocab": vocab, "special_tokens": named, "version": 1, "type": "Tekken"}
        )
    )
    return {token: rank + len(special) for token, rank in ranks.items()}
