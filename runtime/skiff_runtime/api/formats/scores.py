"""POST /v1/rerank and /v1/score: from a request body to a ``RequestSpec``, and the formatters of the responses.

A reranker reads both texts of a pair in one prompt, and its score is the probability of one of two answers. Any other
model embeds each text by itself, and the score is the cosine of the angle between the vectors.
"""

import secrets
import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from skiff_runtime.api.formats.embeddings import NO_SAMPLING
from skiff_runtime.api.formats.request_spec import RequestSpec
from skiff_runtime.api.formats.served_model import ServedModel
from skiff_runtime.api.formats.vectors import VectorResponseFormatter, format_pooling_usage
from skiff_runtime.api.schemas.pooling_bodies import InstructFields, RerankRequest, ScoreRequest
from skiff_runtime.api.schemas.validation import parse_body
from skiff_runtime.messages import PromptOptions, TextOptions, Usage
from skiff_runtime.models.embedding_config import Vector
from skiff_runtime.models.scoring import Scorer
from skiff_runtime.sse import encode_json


def prepare_rerank(raw: bytes, model: ServedModel) -> RequestSpec:
    """Validate a request body. Raises ``RequestError``."""
    body = parse_body(RerankRequest, raw, strict=model.is_strict)
    model = model.choose(body.model)
    documents = body.texts()
    scorer = _make_scorer(model, body, 1, len(documents))
    formatter = RerankResponseFormatter(
        model.name,
        scorer,
        documents=None if body.return_documents is False else documents,
        top_n=body.top_n or len(documents),
    )
    return _make_spec(body, model, scorer, [body.query], documents, formatter)


def prepare_score(raw: bytes, model: ServedModel) -> RequestSpec:
    """Validate a request body. Raises ``RequestError``."""
    body = parse_body(ScoreRequest, raw, strict=model.is_strict)
    model = model.choose(body.model)
    first, second = body.pairs()
    scorer = _make_scorer(model, body, len(first), len(second))
    return _make_spec(body, model, scorer, first, second, ScoreResponseFormatter(model.name, scorer))


def _make_scorer(model: ServedModel, body: InstructFields, num_first: int, count: int) -> Scorer:
    return Scorer.make(model.rerank_template, body.instruct, num_first=num_first, count=count)


def _make_spec(
    body: InstructFields,
    model: ServedModel,
    scorer: Scorer,
    first: Sequence[str],
    second: Sequence[str],
    formatter: "_ScoresFormatter",
) -> RequestSpec:
    # An embedding model whose own pooling is not supported refuses here.
    pooling = scorer.pooling or model.make_embedding_spec()
    return RequestSpec(
        prompts=scorer.make_prompts(first, second, model.embedding),
        sampling=NO_SAMPLING,
        text=TextOptions(),
        formatter=formatter,
        stream=False,
        priority=body.priority or 0,
        user=body.user,
        cache_salt=body.cache_salt,
        adapter_id=model.adapter_id,
        pooling=pooling,
        prompt_options=PromptOptions(add_special_tokens=scorer.template is None),
    )


class _ScoresFormatter(VectorResponseFormatter):
    """The part that both responses share."""

    def __init__(self, prefix: str, model: str, scorer: Scorer) -> None:
        self.id = f"{prefix}-{secrets.token_hex(12)}"
        self._model = model
        self._scorer = scorer

    def format_vector(self, index: int, vector: Vector) -> dict[str, Any]:
        return {"vector": vector}

    def format_full(self, choices: list[dict[str, Any]], usage: Usage) -> bytes:
        scores = self._scorer.compute_scores([choice["vector"] for choice in choices])
        return encode_json({**self._format_scores(scores), "usage": format_pooling_usage(usage)})

    @abstractmethod
    def _format_scores(self, scores: list[float]) -> dict[str, Any]:
        """Return the response's fields but ``usage``."""


class RerankResponseFormatter(_ScoresFormatter):
    """Writes the response of POST /v1/rerank: the ``top_n`` best documents, the best first, ties in their own order.

    ``documents`` are their texts, or None if the response omits these.
    """

    def __init__(self, model: str, scorer: Scorer, *, documents: Sequence[str] | None, top_n: int) -> None:
        super().__init__("rerank", model, scorer)
        self._documents = documents
        self._top_n = top_n

    def _format_scores(self, scores: list[float]) -> dict[str, Any]:
        best = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[: self._top_n]
        results: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in best]
        if self._documents is not None:
            results = [{**each, "document": {"text": self._documents[each["index"]]}} for each in results]
        return {"id": self.id, "model": self._model, "results": results}


class ScoreResponseFormatter(_ScoresFormatter):
    """Writes the response of POST /v1/score: the scores of all pairs, in their order."""

    def __init__(self, model: str, scorer: Scorer) -> None:
        super().__init__("score", model, scorer)

    def _format_scores(self, scores: list[float]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "list",
            "created": int(time.time()),
            "model": self._model,
            "data": [
                {"index": index, "object": "score", "score": score} for index, score in enumerate(scores)
            ],
        }
