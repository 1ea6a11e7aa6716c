"""Bodies of the endpoints that return vectors and scores, as pydantic models.

The docstrings of these classes are descriptions in the OpenAPI document. Responses are written without these models.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from skiff_runtime.api.schemas.request_bodies import (
    MAX_PRIORITY,
    MAX_SALT_CHARACTERS,
    StrictModel,
    TokenIds,
    exactly_one,
)

MAX_INPUTS: Final = 2048
"""Texts of one request, as in OpenAI's API."""
MAX_INSTRUCTION_CHARACTERS: Final = 16 << 10

Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[list[Text], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]


def _as_texts(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


TextOrTexts = Annotated[Texts, BeforeValidator(_as_texts, json_schema_input_type=Text | Texts)]


def _as_inputs(value: Any) -> Any:
    """Turn a single input, a text or a list of token ids, into a list with this one input."""
    is_one = isinstance(value, str) or (
        isinstance(value, list) and bool(value) and not isinstance(value[0], str | list)
    )
    return [value] if is_one else value


_InputList = Annotated[list[str | TokenIds], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
Inputs = Annotated[
    _InputList,
    BeforeValidator(
        _as_inputs,
        json_schema_input_type=str | Annotated[TokenIds, Field(min_length=1)] | _InputList,
    ),
]


class PoolingFields(StrictModel):
    """Fields that the endpoints of vectors and scores share. Without ``model``, the served model is meant."""

    model: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARACTERS)] | None = None
    user: Annotated[str, Field(max_length=512)] | None = None


class EmbeddingRequest(PoolingFields):
    """The body of POST /v1/embeddings. `input` is a text, a list of token ids, or a list of either."""

    expected_types: ClassVar[Mapping[str, str]] = {
        "input": "must be a text, a list of token ids, or a list of those"
    }

    model: Annotated[str, Field(min_length=1, max_length=512)]
    input: Inputs
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=1 << 20)] | None = None
    normalize: bool | None = None
    prompt_name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    add_special_tokens: bool | None = None


class TextDocument(StrictModel):
    """A document as an object."""

    text: Text


class InstructFields(PoolingFields):
    """`instruct` is the task that a reranker is given with each pair; embeddings take none."""

    instruct: Annotated[str, Field(min_length=1, max_length=MAX_INSTRUCTION_CHARACTERS)] | None = None


class RerankRequest(InstructFields):
    """The body of POST /v1/rerank, in the shape of Jina and Cohere. `top_n` 0 returns all documents."""

    query: Text
    documents: Annotated[
        list[Text | TextDocument], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)
    ]
    top_n: Annotated[int, Field(ge=0, le=(1 << 31) - 1)] | None = None
    return_documents: bool | None = None

    def texts(self) -> list[str]:
        """Return the documents as texts."""
        return [each if isinstance(each, str) else each.text for each in self.documents]


class ScoreRequest(InstructFields):
    """The body of POST /v1/score, in vLLM's shape. One text of the first list is paired with each of the second.

    vLLM calls the lists `text_1` and `text_2`, and in newer versions `queries` and `documents`.
    """

    model_config = ConfigDict(
        json_schema_extra={
            "allOf": [exactly_one("text_1", "queries"), exactly_one("text_2", "documents")],
        }
    )

    text_1: TextOrTexts | None = None
    text_2: TextOrTexts | None = None
    queries: TextOrTexts | None = None
    documents: TextOrTexts | None = None

    @model_validator(mode="after")
    def _check_texts(self) -> Self:
        for one, other in (("text_1", "queries"), ("text_2", "documents")):
            if (getattr(self, one) is None) == (getattr(self, other) is None):
                raise PydanticCustomError(
                    "texts", "send one of '{one}' and '{other}'", {"one": one, "other": other}
                )
        first, second = self.pairs()
        if len(first) not in (1, len(second)):
            raise PydanticCustomError(
                "texts",
                "{first} texts cannot be paired with {second}: send one text, or equal numbers",
                {"first": len(first), "second": len(second)},
            )
        return self

    def pairs(self) -> tuple[list[str], list[str]]:
        """Return the first texts, one or as many as the second ones, and the second texts."""
        return self.text_1 or self.queries or [], self.text_2 or self.documents or []


class PoolingUsage(BaseModel):
    """Token counts of a request without output."""

    prompt_tokens: int
    total_tokens: int


class Embedding(BaseModel):
    """The vector of one input: numbers, or the bytes of little-endian 32-bit floats in base64."""

    index: int
    object: Literal["embedding"]
    embedding: list[float] | str


class EmbeddingResponse(BaseModel):
    """The vectors of all inputs, in their order."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: PoolingUsage


class RerankedDocument(BaseModel):
    """The text of a document."""

    text: str


class RerankResult(BaseModel):
    """The score of one document; `index` is its position in the request."""

    index: int
    relevance_score: float
    document: RerankedDocument | None = None


class RerankResponse(BaseModel):
    """The documents by falling relevance."""

    id: str
    model: str
    results: list[RerankResult]
    usage: PoolingUsage


class PairScore(BaseModel):
    """The score of one pair."""

    index: int
    object: Literal["score"]
    score: float


class ScoreResponse(BaseModel):
    """The scores of all pairs, in their order."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PairScore]
    usage: PoolingUsage
