"""Embeddings and scores of ``LLM`` equal those of transformers, over two ranks and the transport between processes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from embedding_models import (
    QUERY_PROMPT,
    make_embedding_model,
    make_reranker,
    reference_embeddings,
    reference_scores,
)
from engine_driver import DEVICE
from gpus import needs_gpus

from skiff_runtime import LLM
from skiff_runtime.errors import InvalidRequest

pytestmark = [pytest.mark.integration, needs_gpus(2)]

TEXTS = [
    "The small boat",
    "A pod starts, a service answers, and the operator watches both of them. " * 4,
    "naïve café",
]
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_embedding_model(tmp_path_factory.mktemp("embedding"), seed=3)


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    options: dict[str, Any] = {"max_total_tokens": 1024, "page_size": 4, "max_num_batched_tokens": 48}
    with LLM(str(model), device=DEVICE, tp_size=2, **options) as made:
        yield made


def test_embeddings_equal_those_of_transformers(llm: LLM, model: Path) -> None:
    inputs: list[str | list[int]] = [*TEXTS, [5, 6, 7]]
    vectors = llm.embed(inputs)
    assert {vector.dtype.name for vector in vectors} == {"float32"}
    np.testing.assert_allclose(np.stack(vectors), reference_embeddings(model, inputs), atol=TOLERANCE)
    [alone] = llm.embed(TEXTS[1])
    np.testing.assert_allclose(alone, vectors[1], atol=TOLERANCE)


def test_vectors_are_cut_before_they_are_normalized(llm: LLM, model: Path) -> None:
    whole = reference_embeddings(model, TEXTS, normalize=False).numpy()
    short = llm.embed(TEXTS, dimensions=8)
    expected = whole[:, :8] / np.linalg.norm(whole[:, :8], axis=1, keepdims=True)
    np.testing.assert_allclose(np.stack(short), expected, atol=TOLERANCE)
    plain = llm.embed(TEXTS, dimensions=8, normalize=False)
    np.testing.assert_allclose(np.stack(plain), whole[:, :8], atol=1e-3)
    with pytest.raises(InvalidRequest, match="have 64 numbers"):
        llm.embed(TEXTS, dimensions=65)


def test_prompt_of_the_checkpoint_precedes_the_text(llm: LLM) -> None:
    [named] = llm.embed("boat", prompt_name="query")
    [written] = llm.embed(QUERY_PROMPT + "boat")
    np.testing.assert_array_equal(named, written)
    with pytest.raises(InvalidRequest, match="it has 'query', 'document'"):
        llm.embed("boat", prompt_name="passage")


def test_scores_of_an_embedding_model_are_similarities(llm: LLM, model: Path) -> None:
    vectors = reference_embeddings(model, TEXTS).numpy()
    np.testing.assert_allclose(llm.score(TEXTS[0], TEXTS), vectors @ vectors[0], atol=TOLERANCE)
    pairs = llm.score(TEXTS, [TEXTS[1]] * 3)
    np.testing.assert_allclose(pairs, vectors @ vectors[1], atol=TOLERANCE)
    with pytest.raises(InvalidRequest, match="'instruct' is for rerankers"):
        llm.score("boat", "row", instruct="find boats")


def test_model_without_output_head_does_not_generate(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="no output head"):
        llm.generate("The small boat", max_tokens=2)


def test_reranker_scores_equal_those_of_the_published_recipe(tmp_path: Path) -> None:
    model = make_reranker(tmp_path, seed=8)
    with LLM(str(model), max_total_tokens=2048) as llm:
        scores = llm.score("which boat", TEXTS)
        other = llm.score(["which boat", "what pod"], TEXTS[:2], instruct="find the pod")
        completion = llm.generate("The small boat", max_tokens=2, ignore_eos=True)[0]
    expected = reference_scores(model, INSTRUCTION, [("which boat", text) for text in TEXTS])
    np.testing.assert_allclose(scores, expected, atol=TOLERANCE)
    pairs = [("which boat", TEXTS[0]), ("what pod", TEXTS[1])]
    np.testing.assert_allclose(other, reference_scores(model, "find the pod", pairs), atol=TOLERANCE)
    assert len(set(scores)) == 3 and all(0 < score < 1 for score in scores)
    assert len(completion.token_ids) == 2


def test_mean_pooling_and_missing_normalization_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    model = make_embedding_model(tmp_path, "llama", seed=5, mode="mean", normalize=False)
    with LLM(str(model), max_total_tokens=1024, max_num_batched_tokens=16) as llm:
        vectors = llm.embed(TEXTS)
    expected = reference_embeddings(model, TEXTS, mean=True, normalize=False)
    np.testing.assert_allclose(np.stack(vectors), expected, atol=5e-4)
