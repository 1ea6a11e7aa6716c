"""YaRN: greedy tokens equal those of transformers at positions beyond the context that the model was trained for."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from engine_driver import generate, make_engine
from pairwise import mark_beyond_pairs
from tiny_models import edit_json, load_reference, make_model, oracle_choices
from tiny_tokenizer import VOCAB_SIZE

from skiff_runtime import LLM

ORIGINAL: Final = 48
"""Tokens of the original context; YaRN extends it to four times as many."""
YARN: Final[dict[str, Any]] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}
COUNT: Final = 12
FAMILIES: Final = ("llama", "qwen3")


def long_prompts() -> list[list[int]]:
    """Return prompts that end inside of the original context, at its end, and beyond it."""
    random = np.random.default_rng(11)
    lengths = (5, ORIGINAL - COUNT, ORIGINAL, ORIGINAL + 1, 100, 4 * ORIGINAL - COUNT)
    return [random.integers(2, VOCAB_SIZE, length).tolist() for length in lengths]


def make_unscaled_model(path: Path, family: str) -> Path:
    """Make a model without a scaling of its own, whose context is the original one."""
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    return make_model(path, family, seed=12, max_position_embeddings=ORIGINAL, rope_parameters=rope)


def scale(path: Path) -> None:
    """Write YaRN's settings to the model's own configuration."""
    edit_json(path / "config.json", rope_parameters={**YARN, "rope_theta": 10000.0})


@pytest.mark.parametrize(
    ("family", "page_size", "by_option"), mark_beyond_pairs(FAMILIES, (1, 16), (False, True))
)
def test_tokens_equal_transformers_beyond_the_original_context(
    tmp_path: Path, family: str, page_size: int, by_option: bool
) -> None:
    """The settings of the checkpoint and those of ``--rope-scaling`` are the same."""
    model, crowd = make_unscaled_model(tmp_path / "model", family), long_prompts()
    options: dict[str, Any] = {"rope_scaling": json.dumps(YARN)} if by_option else {}
    if not by_option:
        scale(model)
    engine = make_engine(model, page_size=page_size, max_model_len=4 * ORIGINAL, **options)
    got = generate(engine, crowd, COUNT, page_size=page_size, budget=40, slots=4)
    engine.close()
    scale(model)
    reference = load_reference(model)
    assert got == oracle_choices(reference, crowd, got)
    edit_json(model / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    assert got != oracle_choices(load_reference(model), crowd, got), "the scaling changes nothing"


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3", marks=pytest.mark.matrix)])
def test_option_reaches_every_process(tmp_path: Path, family: str) -> None:
    """The ranks read the model's configuration themselves."""
    model, crowd = make_unscaled_model(tmp_path / "model", family), long_prompts()
    with LLM(
        str(model), rope_scaling=json.dumps(YARN), max_total_tokens=1024, page_size=4, cpu_threads=1
    ) as llm:
        done = llm.generate(crowd, max_tokens=COUNT, temperature=0, ignore_eos=True)
    outputs = [each.token_ids for each in done]
    scale(model)
    assert [len(output) for output in outputs] == [COUNT] * len(crowd)
    assert outputs == oracle_choices(load_reference(model), crowd, outputs)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
