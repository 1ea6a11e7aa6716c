"""Packs conversations and plain texts into rows of token ids, one batch per step, the same for the same seed.

Texts follow each other in a row without a mask between them, so the model learns to answer after long histories.
"""

from __future__ import annotations

import random
from functools import lru_cache
from pathlib import Path

import numpy as np
from build_tokenizer import BOS, END, EOS
from conversations import Message, conversation, plain_text
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tool_use import tool_conversation

IGNORED = -100
PLAIN_SHARE = 0.15
TOOL_SHARE = 0.25

Piece = tuple[list[int], list[int]]


class RowMaker:
    """Makes the batch of any step. Ids and labels are int64 arrays [rows, length]; labels are not shifted."""

    def __init__(self, tokenizer_file: Path, *, rows: int, length: int, seed: int) -> None:
        self.tokenizer = Tokenizer.from_file(str(tokenizer_file))
        self.rows, self.length, self.seed = rows, length, seed
        self.encode = lru_cache(maxsize=200_000)(self._encode)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def special(self, token: str) -> int:
        token_id = self.tokenizer.token_to_id(token)
        assert token_id is not None, f"{token} is not in the tokenizer"
        return token_id

    def chat(self, messages: list[Message]) -> Piece:
        """Ids of a rendered chat; only the assistant's words and their end are learned."""
        ids = [self.special(BOS)]
        labels = [IGNORED]
        for message in messages:
            content = [*self.encode(message.content), self.special(END)]
            learned = message.role == "assistant"
            ids += [self.special(f"<|{message.role}|>"), *content]
            labels += [IGNORED, *(content if learned else [IGNORED] * len(content))]
        return ids, labels

    def plain(self, text: str) -> Piece:
        ids = [self.special(BOS), *self.encode(text), self.special(EOS)]
        return ids, [IGNORED, *ids[1:]]

    def piece(self, rng: random.Random) -> Piece:
        kind = rng.random()
        if kind < PLAIN_SHARE:
            return self.plain(plain_text(rng))
        return self.chat(tool_conversation(rng) if kind < PLAIN_SHARE + TOOL_SHARE else conversation(rng))

    def row(self, rng: random.Random) -> Piece:
        ids: list[int] = []
        labels: list[int] = []
        while len(ids) < self.length:
            piece = self.piece(rng)
            ids += piece[0]
            labels += piece[1]
        return ids[: self.length], labels[: self.length]

    def __call__(self, step: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        rng = random.Random(f"{self.seed}-{step}")
        rows = [self.row(rng) for _ in range(self.rows)]
        return np.array([ids for ids, _ in rows]), np.array([labels for _, labels in rows])
