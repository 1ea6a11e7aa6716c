"""Greedy tokens equal those of transformers for any model, cache, ranks, overlap, budget, page size and memory pressure.

The ordinary run takes a few settings that cover every pair of options, of three families; ``make matrix`` takes all.
``SKIFF_TEST_SEED`` chooses other weights and prompts.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from gpus import needs_gpus
from parity import FAMILIES, TOKENS, Outcome, Setting, covering, product, prompts, serve, serve_all
from rank_processes import on_ranks, single_rank
from tiny_models import load_reference, make_model, oracle_choices

SEED: Final = int(os.environ.get("SKIFF_TEST_SEED", "0"))
RANKS_TIMEOUT_SECONDS: Final = 1200.0


def as_parameters(settings: Sequence[Setting]) -> list[Any]:
    return [pytest.param(each, marks=needs_gpus(each.tp), id=str(each)) for each in settings]


class World:
    """The models, their references, and the outcomes of ranks in other processes."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._models = directory / "models"
        self._crowd = prompts(SEED)
        self._right: dict[str, Any] = {}
        self._answers: dict[Setting, Outcome] = {}
        self._runs = 0
        for number, family in enumerate(FAMILIES):
            make_model(self._models / family, family, seed=SEED + number, num_hidden_layers=2)

    def outcome(self, setting: Setting, *, together: Sequence[Setting]) -> Outcome:
        """Serve in this process, or with two ranks in processes that serve all of ``together``."""
        if setting.tp > 1:
            if setting not in self._answers:
                self._ask_ranks([other for other in together if other.tp == setting.tp])
            return self._answers[setting]
        path = self._models / setting.family
        outcome = serve(single_rank(), setting, path, self._crowd, self._run_dir())
        assert outcome is not None
        return outcome

    def check(self, setting: Setting, outcome: Outcome) -> None:
        """Check that every token is transformers' choice after those before it."""
        if self._right.get(setting.family) != outcome.outputs:
            reference = load_reference(self._models / setting.family)
            assert all(len(output) == TOKENS for output in outcome.outputs)
            assert outcome.outputs == oracle_choices(reference, self._crowd, outcome.outputs)
            self._right[setting.family] = outcome.outputs

    def _ask_ranks(self, settings: list[Setting]) -> None:
        run_dir = self._run_dir()
        run_dir.mkdir()
        fields = [asdict(setting) for setting in settings]
        first, *_ = on_ranks(
            settings[0].tp,
            run_dir,
            serve_all,
            fields,
            str(self._models),
            self._crowd,
            str(run_dir),
            timeout_seconds=RANKS_TIMEOUT_SECONDS,
        )
        self._answers.update(
            (setting, Outcome(**answer)) for setting, answer in zip(settings, first, strict=True)
        )

    def _run_dir(self) -> Path:
        self._runs += 1
        return self._directory / f"run{self._runs}"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield World(tmp_path_factory.mktemp("parity"))
    torch.set_num_threads(threads)


def check_setting(world: World, setting: Setting, together: Sequence[Setting]) -> None:
    outcome = world.outcome(setting, together=together)
    world.check(setting, outcome)
    assert outcome.preempted > 0
    if setting.cache == "radix":
        assert outcome.evicted_pages > 0 and outcome.cached_tokens > 0
    else:
        assert outcome.evicted_pages == outcome.cached_tokens == 0


@pytest.mark.timeout(600)
@pytest.mark.parametrize("setting", as_parameters(covering()))
def test_tokens_equal_transformers_for_every_pair_of_options(world: World, setting: Setting) -> None:
    check_setting(world, setting, covering())


@pytest.mark.matrix
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("setting", as_parameters(product()))
def test_tokens_equal_transformers_for_every_combination(world: World, setting: Setting) -> None:
    check_setting(world, setting, [other for other in product() if other.family == setting.family])
