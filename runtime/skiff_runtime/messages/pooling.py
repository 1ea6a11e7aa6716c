"""Pooling: a request's result is one vector, computed from the hidden states of its prompt, instead of text."""

from enum import StrEnum

from msgspec import Struct


class PoolingKind(StrEnum):
    """The computation of the vector, from the hidden states behind the model's final norm."""

    LAST = "last"
    """The hidden state of the prompt's last token."""
    MEAN = "mean"
    """The mean over all tokens of the prompt, which is therefore computed whole, without a cached prefix."""
    LOGITS = "logits"
    """The logits of a few tokens behind the prompt."""


class PoolingSpec(Struct, frozen=True, array_like=True):
    """The pooling of one request between processes.

    ``labels`` are the texts of the tokens whose logits are wanted. Each must be a single token of the vocabulary, and
    the tokenizer process sets ``token_ids`` from them.
    """

    kind: PoolingKind
    labels: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()


class PooledVector(Struct, frozen=True, array_like=True):
    """The vector of one request. ``data``: bytes of ``Wire.VECTOR``. The row that ends the request follows it."""

    uid: int
    data: bytes
