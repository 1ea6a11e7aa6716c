"""Vectors of prompts equal those of transformers, for any chunks, batch, cached prefix and preemption."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_driver import DEVICE, Driver, make_engine
from scheduler_bench import generate
from serving_engine import Served, serve
from tiny_models import load_reference, make_model
from tiny_tokenizer import VOCAB_SIZE

from skiff_runtime.messages import (
    FinishReason,
    GenerateRequest,
    PoolingKind,
    PoolingSpec,
    SamplingSpec,
    TextOptions,
    Wire,
)

PROMPTS = [list(range(10, 100)), list(range(200, 217)), [5], list(range(10, 75)), list(range(300, 340))]
LABELS = (7, 311)
TOLERANCE = 2e-4 if DEVICE == "cpu" else 2e-3
LAST, MEAN = PoolingSpec(PoolingKind.LAST), PoolingSpec(PoolingKind.MEAN)
LOGITS = PoolingSpec(PoolingKind.LOGITS, token_ids=LABELS)
SPECS = [LAST, MEAN, LOGITS]
KINDS = [MEAN, MEAN, MEAN, MEAN, LAST, LAST]


def pool(uid: int, prompt: Sequence[int], pooling: PoolingSpec) -> GenerateRequest:
    token_ids = np.array(prompt, Wire.TOKEN).tobytes()
    return GenerateRequest(uid, token_ids, SamplingSpec(max_tokens=0, seed=0), TextOptions(), pooling=pooling)


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), request.param, seed=41)


@torch.inference_mode()
def reference(path: Path, prompts: Sequence[Sequence[int]]) -> dict[PoolingKind, list[Any]]:
    """Compute the vectors of each prompt by itself, with transformers."""
    model = load_reference(path)
    vectors: dict[PoolingKind, list[Any]] = {kind: [] for kind in PoolingKind}
    for prompt in prompts:
        output = model(torch.tensor([list(prompt)]), output_hidden_states=True)
        hidden = output.hidden_states[-1][0].float()
        vectors[PoolingKind.LAST].append(hidden[-1].numpy())
        vectors[PoolingKind.MEAN].append(hidden.mean(0).numpy())
        vectors[PoolingKind.LOGITS].append(output.logits[0, -1, list(LABELS)].float().numpy())
    return vectors


def requests_of_all_kinds() -> list[GenerateRequest]:
    """Return a request of each kind for each prompt, with one that generates between."""
    requests = [
        pool(number * 10 + kind, prompt, spec)
        for kind, spec in enumerate(SPECS)
        for number, prompt in enumerate(PROMPTS)
    ]
    return [*requests[:4], generate(900, PROMPTS[1], max_tokens=8), *requests[4:]]


def assert_vectors(served: Served, path: Path) -> None:
    expected = reference(path, PROMPTS)
    for kind, spec in enumerate(SPECS):
        for number in range(len(PROMPTS)):
            reply = served.replies[number * 10 + kind]
            assert reply.finish is FinishReason.STOP and not reply.tokens
            np.testing.assert_allclose(
                reply.vector, expected[spec.kind][number], atol=TOLERANCE, rtol=TOLERANCE
            )
    assert len(served.replies[900].tokens) == 8
    assert served.lost_pages == 0


@pytest.mark.parametrize(
    "options",
    [
        {"page_size": 4, "max_num_batched_tokens": 7},
        {"page_size": 16, "max_num_batched_tokens": 64},
        {"page_size": 1, "max_num_batched_tokens": 512, "disable_overlap_schedule": True},
        {"page_size": 4, "max_num_batched_tokens": 40, "disable_radix_cache": True},
    ],
    ids=["chunks", "default", "whole", "uncached"],
)
def test_vectors_equal_those_of_transformers(model: Path, options: dict[str, Any]) -> None:
    served = serve(model, requests_of_all_kinds(), **options)
    assert_vectors(served, model)


def test_last_token_uses_cached_prefix_and_mean_computes_whole_prompt(model: Path) -> None:
    prompt = PROMPTS[0]
    requests = [pool(0, prompt, LAST), pool(1, prompt, LAST), pool(2, prompt, MEAN)]
    served = serve(model, requests, page_size=4, max_running_requests=1)
    opened = [served.replies[uid].opened for uid in range(3)]
    assert [each.cached_tokens for each in opened if each is not None] == [0, 88, 0]
    expected = reference(model, [prompt])
    for uid, kind in enumerate([PoolingKind.LAST, PoolingKind.LAST, PoolingKind.MEAN]):
        np.testing.assert_allclose(
            served.replies[uid].vector, expected[kind][0], atol=TOLERANCE, rtol=TOLERANCE
        )


def test_preempted_prompt_begins_anew(model: Path) -> None:
    """Requests that generate take the memory of those behind them, whose prompts are half computed."""
    requests = [
        *(generate(900 + uid, PROMPTS[4], max_tokens=60) for uid in range(3)),
        *(pool(uid, PROMPTS[0], KINDS[uid]) for uid in range(len(KINDS))),
    ]
    served = serve(
        model,
        requests,
        page_size=4,
        max_running_requests=4,
        mixed_prefill_tokens=2,
        max_total_tokens=220,
        new_token_ratio=0.01,
    )
    assert served.preempted and served.lost_pages == 0
    expected = reference(model, PROMPTS[:1])
    for uid in range(len(KINDS)):
        kind = KINDS[uid].kind
        np.testing.assert_allclose(
            served.replies[uid].vector, expected[kind][0], atol=TOLERANCE, rtol=TOLERANCE
        )


def test_sum_of_a_slot_begins_with_its_request(model: Path) -> None:
    """A slot that was left in the middle of a prompt, by an abort or a preemption, opens with nothing summed."""
    engine = make_engine(model, page_size=4)
    driver = Driver(engine, 4)
    left = driver.open(2, PROMPTS[0], pooling=MEAN)
    assert driver.step([(left, 50)]).pooled == ()
    row = driver.open(2, PROMPTS[3], pooling=MEAN)
    assert driver.step([(row, 20)]).pooled == ()
    [pooled] = driver.step([(row, 45)]).pooled
    engine.close()
    assert pooled.slots.tolist() == [2]
    expected = reference(model, [PROMPTS[3]])[PoolingKind.MEAN][0]
    np.testing.assert_allclose(pooled.vectors[0], expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_prompt_may_fill_the_context(model: Path) -> None:
    prompt = [token % VOCAB_SIZE for token in range(2, 258)]
    served = serve(model, [pool(0, prompt, LAST), pool(1, [*prompt, 5], LAST)])
    np.testing.assert_allclose(
        served.replies[0].vector,
        reference(model, [prompt])[PoolingKind.LAST][0],
        atol=TOLERANCE,
        rtol=TOLERANCE,
    )
    failed = served.replies[1].failed
    assert failed is not None and failed.code == "context_length_exceeded"
