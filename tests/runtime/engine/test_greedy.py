"""Greedy tokens of the engine equal those of transformers for any steps, pages and slots."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_driver import Driver, generate, make_engine
from pairwise import mark_beyond_values
from tiny_models import (
    FAMILIES,
    MOE_FAMILIES,
    greedy_tokens,
    load_reference,
    make_model,
    oracle_choices,
    oracle_logits,
)
from tiny_tokenizer import VOCAB_SIZE

from skiff_runtime.messages import SamplingSpec

LENGTHS = (1, 2, 15, 16, 17, 40, 63, 64, 65, 100, 7, 33)
COUNT = 12
SETTINGS = ((1, 24, 5), (16, 1024, 8), (64, 16, 3))
"""Page size, tokens of a step, and slots."""

Model = tuple[Path, Any]


def random_prompts(seed: int) -> list[list[int]]:
    """Return prompts of mixed lengths, some of which share a prefix."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(2, VOCAB_SIZE, length).tolist() for length in LENGTHS]
    prompts[5][:32] = prompts[8][:32]
    return prompts


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    """A function that returns the model of a family and its reference, which are made once."""

    @cache
    def make(family: str) -> Model:
        path = make_model(tmp_path_factory.mktemp(family), family, seed=3)
        return path, load_reference(path)

    return make


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("llama"), "llama", seed=4)


@pytest.mark.parametrize(("family", "setting"), mark_beyond_values(FAMILIES, SETTINGS, rounds=1), ids=str)
def test_greedy_tokens_equal_transformers(
    models: Callable[[str], Model], family: str, setting: tuple[int, int, int]
) -> None:
    path, reference = models(family)
    page_size, budget, slots = setting
    prompts = random_prompts(seed=5)
    engine = make_engine(path, page_size=page_size)
    try:
        engine.warmup()
        got = generate(engine, prompts, COUNT, page_size=page_size, budget=budget, slots=slots)
    finally:
        engine.close()
    assert got == oracle_choices(reference, prompts, got)


def test_request_computes_only_the_tokens_after_its_cached_prefix(llama: Path) -> None:
    """The second request reads the first one's pages in a step in which the first one decodes."""
    reference = load_reference(llama)
    first, second = random_prompts(9)[9], [*random_prompts(9)[9][:64], 5, 6, 7]
    engine = make_engine(llama, page_size=16)
    driver = Driver(engine, 16, seed=2)
    a = driver.open(0, first)
    driver.step([(a, 100)])
    b = driver.open(1, second, shared=a, cached=64)
    driver.step([(a, 1), (b, 3)], decode_rows=1)
    for _ in range(6):
        driver.step([(a, 1), (b, 1)], decode_rows=2)
    engine.close()
    assert a.output == greedy_tokens(reference, first, 8)
    assert b.output == greedy_tokens(reference, second, 7)


def test_steps_launched_ahead_read_tokens_on_the_device(llama: Path) -> None:
    engine = make_engine(llama, page_size=4)
    driver = Driver(engine, 4)
    prompt = random_prompts(1)[6]
    row = driver.open(3, prompt)
    handles = [driver.launch([(row, len(prompt))])] + [driver.launch([(row, 1)]) for _ in range(9)]
    tokens = [int(handle.result().tokens[0]) for handle in handles]
    engine.close()
    assert tokens == greedy_tokens(load_reference(llama), prompt, 10)


def test_preempted_request_continues_in_another_slot(llama: Path) -> None:
    """The output so far becomes part of the known tokens, and is computed again over reused pages."""
    engine = make_engine(llama, page_size=16)
    driver = Driver(engine, 16)
    prompt = random_prompts(2)[5]
    row = driver.open(0, prompt)
    driver.step([(row, 40)])
    for _ in range(4):
        driver.step([(row, 1)], decode_rows=1)
    driver.release(row)
    again = driver.open(6, [*prompt, *row.output])
    driver.step([(again, 30)])
    driver.step([(again, 15)])
    driver.step([(again, 1)], decode_rows=1)
    engine.close()
    assert row.output + again.output == greedy_tokens(load_reference(llama), prompt, 7)


def test_bfloat16_tokens_equal_transformers_but_for_near_ties(tmp_path: Path) -> None:
    """In bfloat16 the two round differently: each token must be transformers' choice, or nearly as likely there."""
    path = make_model(tmp_path, "qwen3", seed=1, dtype=torch.bfloat16)
    engine = make_engine(path, dtype="bfloat16", page_size=16)
    prompts = random_prompts(3)
    got = generate(engine, prompts, COUNT, page_size=16, budget=64, slots=8)
    engine.close()
    chosen = torch.tensor(got).flatten()
    logits = torch.cat(oracle_logits(load_reference(path, torch.bfloat16), prompts, got))
    behind = logits.amax(-1) - logits.gather(1, chosen[:, None]).squeeze(1)
    assert behind.max() < 0.25
    assert (logits.argmax(-1) == chosen).float().mean() > 0.9


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_bfloat16_tokens_of_experts_are_as_exact_as_those_of_transformers(
    tmp_path: Path, family: str
) -> None:
    """A rounding error may choose another expert, and then the logits differ by more than rounding errors of their own.

    So tokens in bfloat16 are compared with those of transformers in float32, and transformers' own in bfloat16 likewise.
    Either differs in few tokens, whose numbers are chance: they may differ by two standard deviations.
    """
    path = make_model(tmp_path, family, seed=1, dtype=torch.bfloat16)
    engine = make_engine(path, dtype="bfloat16", page_size=16)
    prompts = [prompt for seed in (3, 4, 5) for prompt in random_prompts(seed)]
    got = generate(engine, prompts, COUNT, page_size=16, budget=64, slots=8)
    engine.close()
    exact, rounded = (
        torch.cat(oracle_logits(load_reference(path, dtype), prompts, got)).argmax(-1)
        for dtype in (torch.float32, torch.bfloat16)
    )
    ours, theirs = (int((tokens != exact).sum()) for tokens in (torch.tensor(got).flatten(), rounded))
    assert ours - theirs <= 2 * (ours + theirs) ** 0.5, (ours, theirs)


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_bfloat16_logprobs_of_experts_are_as_exact_as_those_of_transformers(
    tmp_path: Path, family: str
) -> None:
    """The median over tokens of the error, which few tokens with other experts do not move."""
    path = make_model(tmp_path, family, seed=1, dtype=torch.bfloat16)
    prompts = [prompt for seed in (3, 4, 5) for prompt in random_prompts(seed)]
    engine = make_engine(path, dtype="bfloat16", page_size=16)
    driver, outputs, found = Driver(engine, 16), [], []
    for prompt in prompts:
        row = driver.open(0, prompt, SamplingSpec(max_tokens=COUNT, seed=0, temperature=0.0, logprobs=20))
        results = [driver.step([(row, len(prompt))])]
        results += [driver.step([(row, 1)], decode_rows=1) for _ in range(COUNT - 1)]
        driver.release(row)
        outputs.append(row.output)
        found += [result.logprobs for result in results if result.logprobs is not None]
    engine.close()
    ids, ours = (
        torch.from_numpy(np.concatenate([getattr(each, name) for each in found]))
        for name in ("top_ids", "top_logprobs")
    )
    exact, theirs = (
        torch.cat(oracle_logits(load_reference(path, dtype), prompts, outputs))
        .log_softmax(-1)
        .gather(1, ids.long())
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert exact.shape == (len(prompts) * COUNT, 20)
    our_error, their_error = (
        float((each - exact).square().mean(-1).sqrt().median()) for each in (ours, theirs)
    )
    assert our_error <= 1.05 * their_error


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
