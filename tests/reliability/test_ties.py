"""Which partings count as ties: those that a rounding error in the weights decides, and no others."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from answers import Answer, Choice
from near_ties import find_parting, find_ties
from safetensors.torch import load_file, save_file
from tiny_models import greedy_tokens, load_reference, make_model

PROMPT = [7, 30, 12, 55, 9]


def answer(tokens: Sequence[int], logprobs: Sequence[float] = ()) -> Answer:
    return Answer(
        200, choices={0: Choice(tokens=list(tokens), finish="length", logprobs=list(logprobs))}, ends=1
    )


def greedy(model: Path, numbers: Sequence[int]) -> list[Answer]:
    """Each request is ``PROMPT``; one greedy token of the reference."""
    return [answer(greedy_tokens(load_reference(model), PROMPT, 1)) for _ in numbers]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model that cannot tell its greedy token after ``PROMPT`` from the next one."""
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


def test_a_tie_is_seen_and_nothing_else(model: Path) -> None:
    with torch.inference_mode():
        logits = load_reference(model)(torch.tensor([PROMPT])).logits[0, -1]
    first, second, third = logits.topk(3).indices.tolist()
    assert logits[first] == logits[second] > logits[third]
    partings = [
        find_parting(number, answer([first]), answer([other])) for number, other in enumerate((second, third))
    ]
    assert find_ties(model, [each for each in partings if each], greedy) == [0]


def test_a_model_can_be_asked_again(model: Path) -> None:
    parting = find_parting(0, answer([best(model)]), answer([twin(model)]))
    assert parting is not None
    assert find_ties(model, [parting], greedy) == find_ties(model, [parting], greedy)


def test_a_parting_needs_agreement_before_it() -> None:
    found = find_parting(3, answer([1, 2, 5], [-0.1, -0.2, -9]), answer([1, 2, 6], [-0.1, -0.2, -1]))
    assert found is not None
    assert found.ways == ((1, 2, 5), (1, 2, 6))
    assert find_parting(3, answer([1, 2, 5], [-0.1, -0.3, -1]), answer([1, 2, 6], [-0.1, -0.2, -1])) is None


def test_other_differences_are_no_partings() -> None:
    failed = Answer(500, error="lost", ends=1)
    assert find_parting(0, answer([1, 2]), answer([1, 2, 3])) is None
    assert find_parting(0, failed, answer([1, 2])) is None
    assert find_parting(0, answer([1, 2]), failed) is None
