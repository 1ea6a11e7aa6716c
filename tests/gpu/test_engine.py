"""The engine on a GPU: tokens equal those of transformers, and do not depend on settings that do not change the model."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bf16_engine import SETTINGS, error_of, known_logits, make_wide_model, serve, tie_of
from engine_driver import GREEDY, Driver, generate, make_engine
from scheduler_bench import request

from skiff_runtime.messages import SamplingSpec
from skiff_runtime.step import StepHandle

pytestmark = pytest.mark.gpu

COUNT = 24
BUDGET = 64
"""Tokens per step."""
SAMPLINGS = [
    GREEDY,
    SamplingSpec(max_tokens=COUNT, seed=1, temperature=0.8),
    SamplingSpec(max_tokens=COUNT, seed=2, temperature=1.0, min_p=0.05),
    SamplingSpec(max_tokens=COUNT, seed=3, temperature=1.2, top_k=20, top_p=0.9),
    SamplingSpec(max_tokens=COUNT, seed=4, temperature=0.7, repetition_penalty=1.3, logit_bias=((40, 2.0),)),
    GREEDY,
    SamplingSpec(max_tokens=COUNT, seed=5, temperature=0.5, logprobs=3),
]


def prompts(count: int) -> list[list[int]]:
    random = np.random.default_rng(count)
    return [random.integers(2, 300, int(random.integers(1, 90))).tolist() for _ in range(count)]


def generate_warm(path: Path, samplings: Sequence[SamplingSpec], **changes: Any) -> list[list[int]]:
    """Generate tokens of several requests in mixed batches, by an engine that has warmed up."""
    settings = {**SETTINGS, "max_running_requests": 8, "max_num_batched_tokens": BUDGET, **changes}
    engine = make_engine(path, **settings)
    engine.warmup()
    outputs = generate(
        engine,
        prompts(len(samplings)),
        COUNT,
        page_size=settings["page_size"],
        budget=BUDGET,
        slots=8,
        samplings=samplings,
    )
    engine.close()
    return outputs


ATTENTION = pytest.mark.parametrize("attention", ["triton", "flashinfer,triton", "flashinfer"])


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with heads of 128, which every backend supports."""
    return make_wide_model(tmp_path_factory.mktemp("model"), request.param)


@pytest.mark.parametrize(
    "attention", ["triton", "flashinfer,triton", "flashinfer", "triton,flashinfer", "torch"]
)
def test_greedy_tokens_equal_transformers_but_for_near_ties(model: Path, attention: str) -> None:
    """A near tie is one where transformers' logits of the two tokens differ by no more than bfloat16's rounding error.

    The error is measured against transformers in float32. Tokens may differ twice as often as those of transformers in
    bfloat16 and in float32 do.
    """
    crowd = prompts(12)
    outputs = generate_warm(model, [GREEDY] * 12, attention_backend=attention)
    rounded, exact = (
        torch.cat(known_logits(model, dtype, crowd, outputs)) for dtype in (torch.bfloat16, torch.float32)
    )
    chosen = torch.tensor(outputs).flatten()
    gaps = (rounded.amax(-1) - rounded.gather(1, chosen[:, None]).squeeze(1)) / rounded.abs().amax(-1)
    assert float(gaps.max()) <= tie_of(error_of(rounded, exact))
    different, unsure = (int((rounded.argmax(-1) != each).sum()) for each in (chosen, exact.argmax(-1)))
    assert different <= 2 * max(unsure, len(crowd) * COUNT // 100)


@ATTENTION
def test_tokens_do_not_depend_on_graphs(model: Path, attention: str) -> None:
    plain = generate_warm(model, SAMPLINGS, attention_backend=attention)
    for changes in ({"disable_cuda_graph": True}, {"max_running_requests": 64}):
        assert generate_warm(model, SAMPLINGS, attention_backend=attention, **changes) == plain, changes


@pytest.mark.parametrize("attention", ["triton", "flashinfer,triton"])
def test_tokens_do_not_depend_on_the_page_size(model: Path, attention: str) -> None:
    """FlashInfer's plan depends on tokens alone on Hopper; elsewhere it splits no context of up to 128 tokens."""
    outputs = [
        generate_warm(model, SAMPLINGS, page_size=size, attention_backend=attention) for size in (1, 16, 64)
    ]
    assert outputs[0] == outputs[1] == outputs[2]


@pytest.mark.parametrize("attention", ["triton", "flashinfer,triton"])
def test_identical_steps_give_identical_greedy_tokens(model: Path, attention: str) -> None:
    """The steps are run with and without overlap scheduling, with and without graphs, over pages of any size.

    Only steps of the same rows have the same last bits. So all requests arrive at once, no two share a prefix, each has
    a slot, and the length of an answer does not depend on its tokens.
    """
    sampling = SamplingSpec(max_tokens=COUNT, seed=0, temperature=0.0, ignore_eos=True)
    requests = [request(uid, [uid + 2, *prompt], sampling) for uid, prompt in enumerate(prompts(8))]
    kinds: list[dict[str, Any]] = [{}, {"disable_overlap_schedule": True}, {"disable_cuda_graph": True}]
    kinds += [{"page_size": 1}, {"page_size": 64, "disable_overlap_schedule": True}]
    first, *others = (
        serve(model, requests, attention_backend=attention, max_num_batched_tokens=BUDGET, **changes)
        for changes in kinds
    )
    assert all(len(first.replies[each.uid].tokens) == COUNT for each in requests)
    for changes, other in zip(kinds[1:], others, strict=True):
        assert other.steps == first.steps, changes
        assert other.replies == first.replies, changes


@pytest.mark.parametrize(
    ("dtype", "attention"),
    [
        ("float32", "triton"),
        ("bfloat16", "triton"),
        ("bfloat16", "flashinfer,triton"),
        ("bfloat16", "flashinfer"),
    ],
)
def test_tokens_do_not_depend_on_overlap(model: Path, dtype: str, attention: str) -> None:
    engine = make_engine(model, dtype=dtype, device="cuda", page_size=16, attention_backend=attention)
    engine.warmup()
    outputs = [run(engine, ahead) for ahead in (0, 1, 3)]
    engine.close()
    assert outputs[0] == outputs[1] == outputs[2]


def run(engine: Any, ahead: int) -> list[list[int]]:
    """Generate tokens with ``ahead`` steps in flight."""
    driver = Driver(engine, 16)
    rows = [driver.open(slot, prompt, SAMPLINGS[slot]) for slot, prompt in enumerate(prompts(7))]
    in_flight: list[StepHandle] = [driver.launch([(row, row.known - row.done) for row in rows])]
    steps: list[list[int]] = []
    for _ in range(COUNT):
        in_flight.append(driver.launch([(row, 1) for row in rows], decode_rows=len(rows)))
        while len(in_flight) > ahead:
            steps.append(in_flight.pop(0).result().tokens.tolist())
    steps += [handle.result().tokens.tolist() for handle in in_flight]
    return steps


@pytest.fixture
def memory() -> Iterator[None]:
    torch.cuda.empty_cache()
    yield
    torch.cuda.empty_cache()


def test_largest_steps_fit_beside_a_full_kv_cache(memory: None, model: Path) -> None:
    """The pool takes the memory that the profile leaves; the largest step with the costliest sampling still runs."""
    engine = make_engine(
        model,
        dtype="bfloat16",
        device="cuda",
        max_total_tokens=None,
        max_running_requests=128,
        max_num_batched_tokens=8192,
        mem_fraction_static=0.9,
    )
    engine.warmup()
    assert engine.num_pages * 16 > 1 << 20
    sampling = SamplingSpec(max_tokens=9, seed=1, top_k=2000, top_p=0.9, frequency_penalty=0.5, logprobs=5)
    driver = Driver(engine, 16)
    rows = [driver.open(slot, list(range(2, 66)), sampling) for slot in range(128)]
    driver.step([(row, 64) for row in rows])
    tokens = driver.step([(row, 1) for row in rows], decode_rows=128).tokens
    engine.close()
    assert len(tokens) == 128
