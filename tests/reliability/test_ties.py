"""Only answers that a rounding error of the weights can decide count as near ties."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from answers import Answer, Choice
from near_ties import find_divergence, find_ties
from safetensors.torch import load_file, save_file
from tiny_models import greedy_tokens, load_reference, make_model

PROMPT = [7, 30, 12, 55, 9]


def answer(tokens: Sequence[int], logprobs: Sequence[float] = ()) -> Answer:
    return Answer(
        200, choices={0: Choice(tokens=list(tokens), finish="length", logprobs=list(logprobs))}, ends=1
    )


def greedy(model: Path, numbers: Sequence[int]) -> list[Answer]:
    """Answer each request, which is ``PROMPT``, with one greedy token of the reference."""
    return [answer(greedy_tokens(load_reference(model), PROMPT, 1)) for _ in numbers]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Make a model whose two best tokens after ``PROMPT`` have equal logits."""
    made = make_model(tmp_path / "model", shard_size="1GB")
    file = made / "model.safetensors"
    weights = load_file(file)
    weights["lm_head.weight"][twin(made)] = weights["lm_head.weight"][best(made)]
    save_file(weights, file, metadata={"format": "pt"})
    return made


def best(model: Path) -> int:
    return greedy_tokens(load_reference(model), PROMPT, 1)[0]


def twin(model: Path) -> int:
    return best(model) + 1


def test_equal_logits_are_a_tie_and_others_are_not(model: Path) -> None:
    with torch.inference_mode():
        logits = load_reference(model)(torch.tensor([PROMPT])).logits[0, -1]
    first, second, third = logits.topk(3).indices.tolist()
    assert logits[first] == logits[second] > logits[third]
    divergences = [
        find_divergence(number, answer([first]), answer([other]))
        for number, other in enumerate((second, third))
    ]
    found = [each for each in divergences if each]
    assert find_ties(model, found, greedy) == [0]
    assert find_ties(model, found[:1], greedy) == [0], "the perturbations are reproducible"


def test_answers_must_agree_up_to_the_divergence() -> None:
    found = find_divergence(3, answer([1, 2, 5], [-0.1, -0.2, -9]), answer([1, 2, 6], [-0.1, -0.2, -1]))
    assert found is not None
    assert found.ways == ((1, 2, 5), (1, 2, 6))
    assert (
        find_divergence(3, answer([1, 2, 5], [-0.1, -0.3, -1]), answer([1, 2, 6], [-0.1, -0.2, -1])) is None
    )


def test_other_differences_are_no_divergences() -> None:
    failed = Answer(500, error="lost", ends=1)
    assert find_divergence(0, answer([1, 2]), answer([1, 2, 3])) is None
    assert find_divergence(0, failed, answer([1, 2])) is None
    assert find_divergence(0, answer([1, 2]), failed) is None
