"""Models with sliding windows: greedy tokens equal those of transformers, chunked, cached, preempted, in pages of any size."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from pairwise import mark_beyond_values
from parity import TOKENS, Setting, prompts, serve
from tiny_models import edit_json, load_reference, make_model, oracle_choices

from skiff_runtime.distributed.tensor_parallel import TensorParallelGroup
from skiff_runtime.models.config import read_model_config

MODELS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "mistral": ("mistral", {"sliding_window": 24}),
    "mistral-of-one-token": ("mistral", {"sliding_window": 1}),
    "qwen2-last-layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "qwen3-mixed": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 32,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "num_hidden_layers": 3,
        },
    ),
}
"""Families with settings of their windows, which are shorter than most contexts."""
WINDOWS: Final = {
    "mistral": (24, 24),
    "mistral-of-one-token": (1, 1),
    "qwen2-last-layers": (None, 20),
    "qwen3-mixed": (32, None, 32),
}
OPTIONS: Final = (("radix", True, 16, 16), ("radix", False, 1024, 64), ("naive", True, 16, 1))
"""Cache, overlap, budget and page size."""


@dataclass
class World:
    """The models, their prompts, and a folder for each run."""

    directory: Path
    crowd: list[list[int]]

    def path(self, name: str) -> Path:
        return self.directory / name


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    made = World(tmp_path_factory.mktemp("windows"), prompts(7))
    for number, (name, (family, options)) in enumerate(MODELS.items()):
        make_model(made.path(name), family, seed=20 + number, **{"num_hidden_layers": 2, **options})
    yield made
    torch.set_num_threads(threads)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "options"), mark_beyond_values(tuple(MODELS), OPTIONS), ids=str)
def test_tokens_equal_transformers(world: World, name: str, options: tuple[str, bool, int, int]) -> None:
    path = world.path(name)
    assert read_model_config(path).sliding_windows == WINDOWS[name]
    cache, overlap, budget, page_size = options
    setting = Setting(name, cache, 1, overlap, budget, page_size)
    # The path of a socket must be short.
    run_dir = world.directory / f"run{list(MODELS).index(name)}{OPTIONS.index(options)}"
    outcome = serve(TensorParallelGroup(), setting, path, world.crowd, run_dir)
    assert outcome is not None and outcome.preempted > 0
    assert (outcome.cached_tokens > 0) is (cache == "radix")
    assert all(len(output) == TOKENS for output in outcome.outputs)
    assert outcome.outputs == oracle_choices(load_reference(path), world.crowd, outcome.outputs)


@pytest.mark.parametrize("name", MODELS)
def test_tokens_depend_on_the_window(world: World, name: str, tmp_path: Path) -> None:
    """The same weights with full attention choose other tokens, so the comparison above can fail."""
    for file in world.path(name).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    edit_json(tmp_path / "config.json", sliding_window=None, use_sliding_window=False, layer_types=...)
    assert not any(read_model_config(tmp_path).sliding_windows)
    outputs = [prompt[:8] for prompt in world.crowd]
    full, windowed = (
        oracle_choices(load_reference(path), world.crowd, outputs) for path in (tmp_path, world.path(name))
    )
    assert full != windowed
