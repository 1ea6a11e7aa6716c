"""Bias, penalties, ``min_tokens``, bad words and allowed tokens against transformers' processors, a naive float64 reference, and a whole model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_driver import Driver, generate, make_engine
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_logits_processors import process_row
from tiny_models import load_reference, make_model, oracle_logits
from tiny_tokenizer import EOS_ID
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from skiff_runtime.engine.input_batch import SampledRows
from skiff_runtime.engine.logits_processors import MASKED_LOGIT, LogitsProcessors
from skiff_runtime.kernels import penalties
from skiff_runtime.messages import SamplingSpec
from skiff_runtime.step import SlotOpened

VOCAB = 60
EOS = (1, 7)
SLOTS = 6


def params(**changes: Any) -> SamplingSpec:
    return SamplingSpec(**{"max_tokens": 64, "seed": 0, "temperature": 0.0, **changes})


def process(logits: torch.Tensor, texts: Sequence[tuple[list[int], list[int], SamplingSpec]]) -> torch.Tensor:
    """Process logits [S, V] of texts (prompt, output), which are in slots S - 1 to 0."""
    slots = np.arange(len(texts), dtype=np.int32)[::-1].copy()
    positions = np.array([len(prompt) + len(output) for prompt, output, _ in texts], dtype=np.int32)
    table = torch.randint(VOCAB, (SLOTS, 40), dtype=torch.int32, generator=torch.Generator().manual_seed(5))
    processors = LogitsProcessors(table, vocab_size=VOCAB, eos_token_ids=EOS)
    for slot, (prompt, output, sampling) in zip(slots.tolist(), texts, strict=True):
        tokens = np.array([*prompt, *output], dtype=np.int32)
        table[slot, : len(tokens)] = torch.from_numpy(tokens)
        processors.open([SlotOpened(slot, tokens, sampling, len(prompt))])
    # Logits that were gathered from several ranks are a slice of wider rows.
    result = torch.cat([logits, logits], dim=1)[:, :VOCAB]
    columns = torch.from_numpy(slots).long(), torch.from_numpy(positions).long()
    processors.apply(result, SampledRows(*columns, slots, positions))
    return result


TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=18)
REQUESTS = st.fixed_dictionaries(
    {},
    optional={
        "repetition_penalty": st.floats(0.3, 3.0),
        "presence_penalty": st.floats(-2.0, 2.0),
        "frequency_penalty": st.floats(-2.0, 2.0),
        "min_tokens": st.integers(0, 20),
        "bad_words": st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), max_size=6).map(
            tuple
        ),
        "allowed_token_ids": st.lists(st.integers(0, VOCAB - 1), max_size=5).map(tuple),
        "stop_token_ids": st.lists(st.integers(0, VOCAB - 1), max_size=3).map(tuple),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=5).map(
            lambda bias: tuple(bias.items())
        ),
    },
)
OUTPUT = TOKENS | st.lists(st.integers(0, 3), max_size=18)
"""Also of few tokens, so that bad words are found in it."""
TEXT = st.tuples(OUTPUT.filter(bool), OUTPUT, REQUESTS.map(lambda each: params(**each)))


@settings(max_examples=150, deadline=None)
@given(texts=st.lists(TEXT, min_size=1, max_size=SLOTS), seed=st.integers(0, 1000), small=st.booleans())
def test_each_row_equals_reference_in_any_batch(
    texts: list[tuple[list[int], list[int], SamplingSpec]], seed: int, small: bool
) -> None:
    # Gathered logits of several ranks are a slice of wider rows.
    logits = torch.randn(len(texts), VOCAB, generator=torch.Generator().manual_seed(seed)) * 4
    with pytest.MonkeyPatch.context() as patch:
        if small:
            patch.setattr(penalties, "SLICE_ELEMENTS", 2 * VOCAB)
        together = process(logits, texts)
    for row, (prompt, output, sampling) in enumerate(texts):
        alone = process(logits[row : row + 1], [(prompt, output, sampling)])[0]
        assert torch.equal(together[row], alone)
        expected = process_row(logits[row], prompt, output, sampling, end_tokens=EOS, masked=MASKED_LOGIT)
        torch.testing.assert_close(alone.double(), expected, rtol=1e-5, atol=1e-5)
        if params() == sampling:
            assert torch.equal(alone, logits[row])


def test_processors_equal_those_of_transformers() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3)) * 3
    prompt, output = [3, 4, 5, 5], [9, 9, 1, 4]
    ids = torch.tensor([prompt + output])
    repeated = RepetitionPenaltyLogitsProcessor(1.7)(ids, logits)
    assert torch.equal(process(logits, [(prompt, output, params(repetition_penalty=1.7))]), repeated)
    biased = SequenceBiasLogitsProcessor([[[8], -4.0], [[2], 11.5]])(ids, logits)
    assert torch.equal(process(logits, [(prompt, output, params(logit_bias=((8, -4.0), (2, 11.5))))]), biased)
    for min_tokens in (4, 5):
        shortened = MinNewTokensLengthLogitsProcessor(len(prompt), min_tokens, list(EOS))(ids, logits.clone())
        ours = process(logits, [(prompt, output, params(min_tokens=min_tokens))])
        assert torch.equal(ours.masked_fill(ours == MASKED_LOGIT, -torch.inf), shortened)


def test_bad_words_equal_those_of_transformers() -> None:
    """Bad words match where the output alone contains their beginnings."""
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3)) * 3
    words = ((8,), (9, 2), (4, 9, 3), (5, 9, 6), (9, 8), (2, 9), (7, 4, 9, 2))
    masked = NoBadWordsLogitsProcessor([list(word) for word in words])(
        torch.tensor([[5, 4, 9]]), logits.clone()
    )
    ours = process(logits, [([30], [5, 4, 9], params(bad_words=words))])
    assert torch.equal(ours.masked_fill(ours == MASKED_LOGIT, -torch.inf), masked)
    assert torch.isinf(masked).sum() == 3
    in_prompt = process(logits, [([30, 5, 4], [9], params(bad_words=((4, 9, 3),)))])
    assert torch.equal(in_prompt, logits)


def test_reopened_slot_drops_all_old_processors() -> None:
    table = torch.zeros((1, 10), dtype=torch.int32)
    processors = LogitsProcessors(table, vocab_size=VOCAB, eos_token_ids=EOS)
    tokens = np.array([1, 2], dtype=np.int32)
    everything = params(
        min_tokens=9,
        logit_bias=((4, 5.0), (VOCAB, 1.0), (-1, 1.0)),
        presence_penalty=1.0,
        stop_token_ids=(99,),
        bad_words=((5,), (VOCAB,)),
        allowed_token_ids=(3, VOCAB),
    )
    one, position = np.zeros(1, dtype=np.int32), np.full(1, 2, dtype=np.int32)
    rows = SampledRows(torch.zeros(1, dtype=torch.int64), torch.tensor([2]), one, position)
    processors.open([SlotOpened(0, tokens, everything, 1)])
    logits = torch.ones(1, VOCAB)
    processors.apply(logits, rows)
    assert not torch.equal(logits, torch.ones(1, VOCAB))
    processors.open([SlotOpened(0, tokens, params(), 1)])
    logits = torch.ones(1, VOCAB)
    processors.apply(logits, rows)
    assert torch.equal(logits, torch.ones(1, VOCAB))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "llama", seed=23)


def test_preempted_request_resumes_with_identical_tokens(model: Path) -> None:
    prompts = [list(range(20 + 3 * row, 45 + 3 * row)) for row in range(6)]
    samplings = [
        params(),
        params(repetition_penalty=1.8),
        params(presence_penalty=2.0, frequency_penalty=1.5),
        params(logit_bias=((EOS_ID, 100.0),), min_tokens=7),
        params(logit_bias=((30, 6.0), (77, -3.0)), frequency_penalty=0.7, repetition_penalty=0.8),
        params(
            allowed_token_ids=(9, 30, 31), bad_words=((30,), (31, 31), (31, 9, 31)), frequency_penalty=0.3
        ),
    ]
    engine = make_engine(model, page_size=4)
    outputs = generate(engine, prompts, 16, page_size=4, budget=24, slots=4, samplings=samplings)
    resumed = []
    for prompt, output, sampling in zip(prompts, outputs, samplings, strict=True):
        driver = Driver(engine, 4)
        row = driver.open(2, prompt, sampling, output=output[:9])
        driver.step([(row, 20)])
        driver.step([(row, row.known - 20)])
        while len(row.output) < 16:
            driver.step([(row, 1)], decode_rows=1)
        resumed.append(row.output)
    engine.close()
    assert resumed == outputs
    assert EOS_ID not in outputs[3][:7] and outputs[3][7] == EOS_ID
    logits = oracle_logits(load_reference(model), prompts, outputs)
    for number, (prompt, output, sampling) in enumerate(zip(prompts, outputs, samplings, strict=True)):
        expected = [
            int(
                process_row(
                    logits[number][at], prompt, output[:at], sampling, end_tokens=[EOS_ID], masked=-torch.inf
                ).argmax()
            )
            for at in range(16)
        ]
        assert output == expected
