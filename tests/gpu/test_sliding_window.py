"""Models with sliding windows on a GPU: tokens equal those of transformers, and do not depend on how they are computed."""

from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from bf16_engine import SETTINGS, error_of, known_logits, make_wide_model, tie_of
from engine_driver import GREEDY, Driver, generate, make_engine
from shared_prefix_probe import record_shared_steps

from skiff_runtime.messages import SamplingSpec

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

COUNT: Final = 24
BUDGET: Final = 64
"""Tokens per step."""
MODELS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "every layer": ("mistral", {"sliding_window": 20}),
    "mixed": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 33,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}
ATTENTION = pytest.mark.parametrize(
    "attention", ["triton", "flashinfer,triton", "triton,flashinfer", "flashinfer", "torch"]
)


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, options = MODELS[request.param]
    return make_wide_model(tmp_path_factory.mktemp("model"), family, seed=43, **options)


def prompts(count: int) -> list[list[int]]:
    random = np.random.default_rng(count)
    return [random.integers(2, 300, int(random.integers(1, 90))).tolist() for _ in range(count)]


def generate_warm(path: Path, samplings: list[SamplingSpec], **changes: Any) -> list[list[int]]:
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


@ATTENTION
def test_greedy_tokens_equal_transformers_but_for_near_ties(model: Path, attention: str) -> None:
    """By the rule of ``test_engine.py`` for models without windows."""
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


@pytest.mark.parametrize("attention", ["triton", "flashinfer,triton", "flashinfer"])
def test_tokens_do_not_depend_on_graphs(model: Path, attention: str) -> None:
    samplings = [GREEDY, SamplingSpec(max_tokens=COUNT, seed=1, temperature=0.8)] * 3
    plain = generate_warm(model, samplings, attention_backend=attention)
    for changes in ({"disable_cuda_graph": True}, {"max_running_requests": 64}):
        assert generate_warm(model, samplings, attention_backend=attention, **changes) == plain, changes


def test_tokens_do_not_depend_on_the_page_size(model: Path) -> None:
    outputs = [
        generate_warm(model, [GREEDY] * 6, page_size=size, attention_backend="triton") for size in (1, 16, 64)
    ]
    assert outputs[0] == outputs[1] == outputs[2]


@pytest.mark.parametrize("name", MODELS)
def test_tokens_do_not_depend_on_prefix_sharing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Layers with full attention read a shared prefix once, those with a window do not; a model of windows never."""
    family, options = MODELS[name]
    path = make_wide_model(tmp_path, family, seed=7, **options)
    shared_steps = record_shared_steps(monkeypatch)
    outputs = []
    for changes in ({}, {"disable_cuda_graph": True}, {"disable_cascade_attn": True}):
        shared_steps.clear()
        outputs.append(tokens_of_groups(path, **changes))
        assert bool(shared_steps) is (name == "mixed" and "disable_cascade_attn" not in changes)
    assert outputs[0] == outputs[1] == outputs[2]


def tokens_of_groups(path: Path, **changes: Any) -> list[list[int]]:
    """Generate tokens of two groups of rows that share 256 tokens, in float32."""
    common, rows_of_group = 256, 6
    settings: dict[str, Any] = {
        "device": "cuda",
        "max_model_len": 384,
        "max_running_requests": 32,
        "max_total_tokens": 8192,
        "max_num_batched_tokens": 4096,
    }
    engine = make_engine(path, **settings, **changes)
    engine.warmup()
    driver, random = Driver(engine, 16), np.random.default_rng(3)
    heads = [random.integers(2, 300, common).tolist() for _ in range(2)]
    first = [driver.open(slot, [*heads[slot], slot + 2]) for slot in range(2)]
    driver.step([(row, common + 1) for row in first])
    rows = [
        driver.open(slot, [*heads[slot % 2], slot, 5], shared=first[slot % 2], cached=common)
        for slot in range(2, 2 * rows_of_group)
    ]
    driver.step([(row, row.known - row.done) for row in rows])
    all_rows = [*first, *rows]
    for _ in range(COUNT):
        driver.step([(row, 1) for row in all_rows], decode_rows=len(all_rows))
    engine.close()
    return [row.output for row in all_rows]
