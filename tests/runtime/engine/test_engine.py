"""The engine's interface to the scheduler: phases, results, errors, and a warm-up that leaves no trace."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from engine_driver import DEVICE, GREEDY, Driver, make_config, make_engine
from tiny_models import load_reference, make_model, oracle_choices

from skiff_runtime.distributed.tensor_parallel import TensorParallelGroup
from skiff_runtime.engine.engine import Engine
from skiff_runtime.models.config import read_model_config
from skiff_runtime.step import SlotOpened, StepPlan

PROMPT = list(range(10, 40))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "llama", seed=11)


@pytest.fixture
def engine(model: Path) -> Iterator[Engine]:
    engine = make_engine(model, page_size=16)
    yield engine
    engine.close()


def plan_of(slot: int, pages: list[int]) -> StepPlan:
    """Plan the whole prompt in one step."""
    columns = np.arange(len(pages), dtype=np.int32)
    return StepPlan(
        number=0,
        slots=np.array([slot], dtype=np.int32),
        starts=np.zeros(1, dtype=np.int32),
        lengths=np.array([len(PROMPT)], dtype=np.int32),
        samples=np.ones(1, dtype=np.bool_),
        decode_rows=0,
        opened=(SlotOpened(slot, np.array(PROMPT, dtype=np.int32), GREEDY, len(PROMPT)),),
        page_slots=np.full(len(pages), slot, dtype=np.int32),
        page_columns=columns,
        page_ids=np.array(pages, dtype=np.int32),
    )


def test_start_phases_are_reported_in_order_with_progress(model: Path) -> None:
    reported: list[tuple[str, float]] = []
    config = make_config(model)
    engine = Engine(
        config,
        read_model_config(model),
        TensorParallelGroup(),
        on_phase=lambda *phase: reported.append(phase),
    )
    engine.warmup()
    engine.close()
    phases = list(dict.fromkeys(phase for phase, _ in reported))
    assert phases == ["weights", "kv_cache", "warmup"]
    assert reported[0] == ("weights", 0.0)
    assert ("weights", 1.0) in reported
    assert engine.num_pages * config.page_size == 2048


def test_result_has_one_int32_token_per_sampled_row(engine: Engine) -> None:
    driver = Driver(engine, 16)
    a, b = driver.open(0, PROMPT), driver.open(1, PROMPT)
    none = driver.launch([(a, 10), (b, 10)]).result().tokens
    one = driver.launch([(a, 20), (b, 5)]).result().tokens
    assert none.dtype == one.dtype == np.dtype(np.int32)
    assert (len(none), len(one)) == (0, 1)


@pytest.mark.skipif(DEVICE != "cpu", reason="an invalid address ends the process on a GPU")
def test_error_of_a_step_is_raised_by_its_own_result_alone(engine: Engine, model: Path) -> None:
    good, bad = plan_of(2, [3, 4]), plan_of(3, [5, 1 << 20])
    before, broken, after = engine.launch(good), engine.launch(bad), engine.launch(replace(good, number=1))
    with pytest.raises((IndexError, RuntimeError)):
        broken.result()
    expected = oracle_choices(load_reference(model), [PROMPT], [[0]])[0]
    assert before.result().tokens.tolist() == after.result().tokens.tolist() == expected


def test_warmup_leaves_no_trace(engine: Engine, model: Path) -> None:
    cold = engine.launch(plan_of(0, [0, 1])).result().tokens.tolist()
    engine.warmup()
    assert engine.launch(plan_of(0, [0, 1])).result().tokens.tolist() == cold


def test_smallest_engine_warms_up(model: Path) -> None:
    engine = make_engine(model, page_size=1, max_total_tokens=2, max_running_requests=1, max_model_len=2)
    engine.warmup()
    engine.close()
