"""Scores of pairs of texts: the prompt of a reranker and its answer, or the similarity of two embeddings; imports no torch.

A reranker reads both texts of a pair in one prompt, and its score is the probability of one of two answers. Any other
model embeds each text by itself, and the score is the cosine of the angle between the vectors.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np

from skiff_runtime.config import AUTO, Config
from skiff_runtime.errors import InvalidRequest
from skiff_runtime.messages import PoolingKind, PoolingSpec
from skiff_runtime.models.config import ModelConfig
from skiff_runtime.models.embedding_config import EmbeddingConfig, Vector


@dataclass(frozen=True, slots=True)
class RerankTemplate:
    """The prompt by which a reranker judges a pair, and its two answers, each one token."""

    prefix: str
    pair: str
    suffix: str
    default_instruction: str
    negative: str
    positive: str

    def render(self, instruction: str | None, query: str, document: str) -> str:
        """Return the prompt of one pair."""
        pair = self.pair.format(
            instruction=instruction or self.default_instruction, query=query, document=document
        )
        return self.prefix + pair + self.suffix


QWEN3_RERANKER: Final = RerankTemplate(
    prefix="<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n',
    pair="<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}",
    suffix="<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    default_instruction="Given a web search query, retrieve relevant passages that answer the query",
    negative="no",
    positive="yes",
)
"""The prompt that Qwen3-Reranker was trained with, as its model card has it."""
RERANK_TEMPLATES: Final = {"qwen3": QWEN3_RERANKER}
"""By the values of ``--rerank-template``."""


def choose_rerank_template(config: Config, model: ModelConfig) -> str | None:
    """Return the template that ``--rerank-template`` names; for "auto", the one that fits the model's name.

    The checkpoints of Qwen3-Reranker differ from those of Qwen3 in nothing but their weights and their name. That may
    stand anywhere in the reference: a directory of the hub's cache ends with a commit.
    """
    if config.rerank_template != AUTO:
        return None if config.rerank_template == "none" else config.rerank_template
    name = f"{config.model} {config.served_model_name or ''}".lower()
    is_qwen3 = model.architecture == "Qwen3ForCausalLM" and not model.embedding_only
    return "qwen3" if is_qwen3 and "reranker" in name else None


@dataclass(frozen=True, slots=True)
class Scorer:
    """Computes a score for each of ``count`` pairs, from the vectors of the prompts.

    With a ``template`` there is a prompt for each pair. Otherwise the first ``num_first`` prompts are the first texts, one
    for all pairs or one for each, and the others the second texts.
    """

    template: RerankTemplate | None
    instruction: str | None
    num_first: int
    count: int

    @classmethod
    def make(cls, template: str | None, instruction: str | None, *, num_first: int, count: int) -> Self:
        """Return the scorer of a request under the ``template`` of that name. Raises ``InvalidRequest``."""
        if template is None and instruction is not None:
            raise InvalidRequest(
                "'instruct' is for rerankers, and this model's scores are similarities of embeddings; remove it",
                param="instruct",
            )
        return cls(None if template is None else RERANK_TEMPLATES[template], instruction, num_first, count)

    @property
    def pooling(self) -> PoolingSpec | None:
        """The pooling of the prompts; None for that of the model's embeddings."""
        if self.template is None:
            return None
        return PoolingSpec(PoolingKind.LOGITS, labels=(self.template.negative, self.template.positive))

    def make_prompts(
        self, first: Sequence[str], second: Sequence[str], embedding: EmbeddingConfig
    ) -> list[str | list[int]]:
        """Return the prompts of all pairs. Texts to embed follow the default prompt of ``embedding``, as in its own API."""
        if self.template is None:
            return [embedding.add_prompt(text, None) for text in (*first, *second)]
        queries = first if len(first) == self.count else [first[0]] * self.count
        return [self.template.render(self.instruction, *pair) for pair in zip(queries, second, strict=True)]

    def compute_scores(self, vectors: Sequence[Vector]) -> list[float]:
        """Return the scores of all pairs, by the vectors of all prompts."""
        if self.template is not None:
            return [_positive_probability(logits) for logits in vectors]
        if not self.count:
            return []
        first, second = (_unit_rows(part) for part in (vectors[: self.num_first], vectors[self.num_first :]))
        scores: list[float] = (first * second).sum(axis=1).tolist()
        return scores


def _positive_probability(logits: Vector) -> float:
    """Return the softmax of (negative, positive) logits at the positive one."""
    negative, positive = logits.tolist()
    difference = positive - negative
    # Each branch computes the exponential of a number that is not positive, so it cannot overflow.
    if difference >= 0:
        return 1.0 / (1.0 + math.exp(-difference))
    odds = math.exp(difference)
    return odds / (1.0 + odds)


def _unit_rows(vectors: Sequence[Vector]) -> np.ndarray[Any, np.dtype[np.float64]]:
    rows = np.stack(vectors).astype(np.float64)
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    unit: np.ndarray[Any, np.dtype[np.float64]] = rows / np.where(lengths == 0.0, 1.0, lengths)
    return unit
