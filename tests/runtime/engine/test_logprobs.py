"""Log-probabilities equal those of transformers for any chunks, pages and batch."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_driver import DEVICE, Driver, Row, make_engine
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import load_reference, make_model, oracle_logits
from tiny_tokenizer import VOCAB_SIZE

from skiff_runtime.engine.logprobs import BLOCK_TOKENS, MAX_TOP_LOGPROBS, gather_logprobs, top_token_ids
from skiff_runtime.messages import SamplingSpec
from skiff_runtime.step import LogprobsOutput, StepResult

PROMPTS = [list(range(10, 100)), list(range(200, 217)), [5], list(range(300, 340))]


def params(**changes: Any) -> SamplingSpec:
    return SamplingSpec(**{"max_tokens": 64, "seed": 7, **changes})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "qwen3", seed=29)


def assert_logprobs(found: LogprobsOutput, tokens: list[int], logits: torch.Tensor, top: int) -> None:
    """Compare with the log-probabilities of these tokens by logits [N, vocab]."""
    expected = logits.double().log_softmax(-1)
    values = expected.topk(max(top, 1)).values[:, :top]
    dtypes = [column.dtype.name for column in (found.token_logprobs, found.top_logprobs, found.top_ids)]
    assert dtypes == ["float32", "float32", "int32"]
    assert found.top_logprobs.shape == found.top_ids.shape == (len(tokens), top)
    chosen = expected.gather(1, torch.tensor(tokens)[:, None]).squeeze(1)
    np.testing.assert_allclose(found.token_logprobs, chosen.numpy(), atol=2e-4)
    np.testing.assert_allclose(found.top_logprobs, values.numpy(), atol=2e-4)
    of_ids = expected.gather(1, torch.from_numpy(found.top_ids).long())
    np.testing.assert_allclose(of_ids.numpy(), values.numpy(), atol=2e-4)


def narrowed(found: LogprobsOutput, index: int, top: int) -> LogprobsOutput:
    """Return one position, with as many of the most likely tokens as its request wants."""
    at = slice(index, index + 1)
    return LogprobsOutput(found.token_logprobs[at], found.top_ids[at, :top], found.top_logprobs[at, :top])


def test_output_logprobs_are_those_of_unprocessed_logits(model: Path) -> None:
    """They are taken before temperature, penalties and bias, for the rows that request them alone."""
    samplings = [
        params(logprobs=5, temperature=1.7, repetition_penalty=2.0, logit_bias=((50, 9.0),)),
        params(logprobs=None, temperature=0.9),
        params(logprobs=0, temperature=0.0),
        params(logprobs=20, top_k=5, min_tokens=9),
    ]
    engine = make_engine(model, page_size=4)
    driver = Driver(engine, 4)
    rows = [driver.open(slot, prompt, samplings[slot]) for slot, prompt in enumerate(PROMPTS)]
    results = [driver.step([(row, row.known) for row in rows])]
    results += [driver.step([(row, 1) for row in rows], decode_rows=4) for _ in range(5)]
    engine.close()
    outputs = [row.output for row in rows]
    logits = oracle_logits(load_reference(model), PROMPTS, outputs)
    for at, result in enumerate(results):
        assert result.logprob_rows.tolist() == [0, 2, 3]
        assert result.logprobs is not None and result.logprobs.top_logprobs.shape == (3, 20)
        for index, row in enumerate(result.logprob_rows):
            top = samplings[row].logprobs or 0
            found = narrowed(result.logprobs, index, top)
            assert_logprobs(found, [outputs[row][at]], logits[row][at : at + 1], top)
            if row == 2:
                assert result.logprobs.top_ids[index, 0] == outputs[row][at]


def test_no_logprobs_without_a_request(model: Path) -> None:
    engine = make_engine(model)
    driver = Driver(engine, 16)
    row = driver.open(1, PROMPTS[0], params(logprobs=3, prompt_logprobs=3))
    driver.step([(row, 90)])
    other = driver.open(1, PROMPTS[1], params())
    result = driver.step([(other, 17)])
    engine.close()
    assert len(result.logprob_rows) == 0 and result.logprobs is None and result.prompt_logprobs == ()


@pytest.mark.parametrize(("budget", "page_size"), [(7, 1), (33, 4), (64, 16), (200, 64)])
def test_prompt_logprobs_in_chunks(model: Path, budget: int, page_size: int) -> None:
    """Joined, the chunks cover every token of a prompt but the first, once and in order."""
    tops = [3, None, 2, 0]
    engine = make_engine(model, page_size=page_size)
    driver = Driver(engine, page_size)
    rows = [driver.open(slot, PROMPTS[slot], params(prompt_logprobs=tops[slot])) for slot in range(4)]
    chunks: dict[int, list[LogprobsOutput]] = {0: [], 3: []}
    while any(len(row.output) < 2 for row in rows):
        result = step(driver, rows, budget)
        for chunk in result.prompt_logprobs:
            assert chunk.start == 1 + sum(len(part.token_logprobs) for part in chunks[chunk.slot])
            chunks[chunk.slot].append(chunk.logprobs)
    engine.close()
    logits = oracle_logits(
        load_reference(model), [[token] for token in (10, 300)], [PROMPTS[0][1:], PROMPTS[3][1:]]
    )
    for slot, expected in ((0, logits[0]), (3, logits[1])):
        parts = chunks[slot]
        joined = LogprobsOutput(
            *(
                np.concatenate([getattr(part, name) for part in parts])
                for name in ("token_logprobs", "top_ids", "top_logprobs")
            )
        )
        assert_logprobs(joined, PROMPTS[slot][1:], expected, tops[slot] or 0)


def step(driver: Driver, rows: list[Row], budget: int) -> StepResult:
    """Run one token of each decoding row, and spend the rest of the budget on prompts in turn."""
    decodes = [(row, 1) for row in rows if row.output][:budget]
    parts, left = list(decodes), budget - len(decodes)
    for row in rows:
        if not row.output and left > 0:
            parts.append((row, min(left, row.known - row.done)))
            left -= parts[-1][1]
    return driver.step(parts, decode_rows=len(decodes))


def test_preempted_request_does_not_repeat_prompt_logprobs(model: Path) -> None:
    engine = make_engine(model)
    driver = Driver(engine, 16)
    row = driver.open(0, PROMPTS[1], params(prompt_logprobs=2, logprobs=1), output=[40, 41])
    result = driver.step([(row, 19)])
    engine.close()
    assert result.prompt_logprobs == () and result.logprob_rows.tolist() == [0]
    assert result.logprobs is not None
    logits = oracle_logits(load_reference(model), [[*PROMPTS[1], 40, 41]], [row.output[2:]])[0]
    assert_logprobs(result.logprobs, row.output[2:], logits, 1)


def test_equally_likely_tokens_are_ordered_by_id() -> None:
    flat = torch.zeros(1, VOCAB_SIZE).log_softmax(-1)
    flat[0, 7] = flat[0, 3] = -1.0
    found = gather_logprobs(flat, torch.tensor([9]), 2)
    assert found.top_ids.tolist() == [[3, 7]]


@settings(max_examples=50)
@given(
    st.integers(1, MAX_TOP_LOGPROBS),
    st.sampled_from([20, BLOCK_TOKENS * 5, 400, 40 * BLOCK_TOKENS + 1]),
    st.integers(0, 1 << 20),
)
def test_top_tokens_are_ordered_by_value_then_id(count: int, vocab: int, seed: int) -> None:
    """The values are few, so ties reach beyond the last top token; zeros of both signs are equal."""
    drawn = torch.randint(-6, 1, (3, vocab), generator=torch.Generator().manual_seed(seed)).float() / 4
    drawn[0, :9] = -math.inf
    drawn[1, ::3] *= -1.0
    drawn[2, :-1] = -math.inf
    ranked = [sorted(range(vocab), key=lambda token: (-row[token], token))[:count] for row in drawn.tolist()]
    assert top_token_ids(drawn.to(DEVICE), count).tolist() == ranked
