"""Drives an engine by hand-written plans: a minimal scheduler that can make every kind of step."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from skiff_runtime.config import Config
from skiff_runtime.distributed.tensor_parallel import TensorParallelGroup
from skiff_runtime.engine.engine import Engine
from skiff_runtime.messages import CompiledGrammar, PoolingSpec, SamplingSpec
from skiff_runtime.models.config import read_model_config
from skiff_runtime.step import SlotOpened, StepHandle, StepPlan, StepResult

DEVICE: Final = os.environ.get("SKIFF_TEST_DEVICE", "cpu")
"""Device of the engines under test; references run on a CPU."""
GREEDY = SamplingSpec(max_tokens=1 << 20, seed=0, temperature=0.0)


def make_config(path: Path, **changes: Any) -> Config:
    """Return a resolved configuration for a small model."""
    settings: dict[str, Any] = {
        "model": str(path),
        "device": DEVICE,
        "dtype": "float32",
        "max_model_len": 256,
        "max_running_requests": 8,
        "max_total_tokens": 2048,
        "attention_backend": "auto",
        "cpu_threads": 1,
    }
    return Config(**{**settings, **changes})


def make_engine(path: Path, group: TensorParallelGroup | None = None, **changes: Any) -> Engine:
    """Build an engine over the model in ``path``; ``changes`` are fields of ``Config``."""
    config = make_config(path, **changes)
    model = read_model_config(path, max_model_len=config.max_model_len, rope_scaling=config.rope_scaling)
    group = group or TensorParallelGroup(device=torch.device("cuda", 0) if config.device == "cuda" else None)
    return Engine(config, model, group, on_phase=lambda phase, progress: None)


@dataclass
class Row:
    """One request in a slot: ``done`` tokens are computed, and ``known`` tokens exist or are being sampled."""

    slot: int
    prompt: np.ndarray[Any, np.dtype[np.int32]]
    sampling: SamplingSpec = GREEDY
    done: int = 0
    known: int = 0
    pages: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    pooled: bool = False


class Driver:
    """Opens rows, allocates pages in shuffled order, and launches steps."""

    def __init__(self, engine: Engine, page_size: int, seed: int = 0) -> None:
        self._engine = engine
        self._page_size = page_size
        self._free = list(np.random.default_rng(seed).permutation(engine.num_pages))
        self._opened: list[SlotOpened] = []
        self._cells: list[tuple[int, int, int]] = []
        self._number = 0

    def open(
        self,
        slot: int,
        prompt: Sequence[int],
        sampling: SamplingSpec = GREEDY,
        *,
        output: Sequence[int] = (),
        grammar: CompiledGrammar | None = None,
        pooling: PoolingSpec | None = None,
        shared: Row | None = None,
        cached: int = 0,
    ) -> Row:
        """Open a slot; with ``output``, as after a preemption.

        Its first ``cached`` tokens (whole pages) are read from the pages of ``shared``.
        """
        tokens = np.array([*prompt, *output], dtype=np.int32)
        row = Row(slot, tokens, sampling, done=cached, known=len(tokens), output=list(output))
        row.pooled = pooling is not None
        self._opened.append(SlotOpened(slot, tokens, sampling, len(prompt), grammar, pooling))
        if shared is not None:
            assert cached % self._page_size == 0
            for page in shared.pages[: cached // self._page_size]:
                self._add_page(row, page)
        return row

    def launch(self, parts: Sequence[tuple[Row, int]], *, decode_rows: int = 0) -> StepHandle:
        """Launch a step of (row, number of tokens), decode rows first; a row samples when it reaches its last token."""
        rows = [row for row, _ in parts]
        starts = np.array([row.done for row in rows], dtype=np.int32)
        lengths = np.array([length for _, length in parts], dtype=np.int32)
        for row, length in parts:
            row.done += length
            while len(row.pages) * self._page_size < row.done:
                self._add_page(row, self._free.pop())
        samples = np.array([row.done == row.known and not row.pooled for row in rows], dtype=np.bool_)
        for row in np.array(rows, dtype=object)[samples]:
            row.known += 1
        cells = np.array(self._cells, dtype=np.int32).reshape(-1, 3)
        plan = StepPlan(
            number=self._number,
            slots=np.array([row.slot for row in rows], dtype=np.int32),
            starts=starts,
            lengths=lengths,
            samples=samples,
            decode_rows=decode_rows,
            opened=tuple(self._opened),
            page_slots=cells[:, 0],
            page_columns=cells[:, 1],
            page_ids=cells[:, 2],
        )
        self._opened, self._cells, self._number = [], [], self._number + 1
        return self._engine.launch(plan)

    def step(self, parts: Sequence[tuple[Row, int]], *, decode_rows: int = 0) -> StepResult:
        """Launch a step, wait, and append its tokens to the rows that sampled."""
        ends = [row.done + length == row.known and not row.pooled for row, length in parts]
        result = self.launch(parts, decode_rows=decode_rows).result()
        tokens = result.tokens.tolist()
        for (row, _), end in zip(parts, ends, strict=True):
            if end:
                row.output.append(tokens.pop(0))
        assert not tokens
        return result

    def release(self, row: Row) -> None:
        """Free the row's pages."""
        self._free += row.pages

    def _add_page(self, row: Row, page: int) -> None:
        self._cells.append((row.slot, len(row.pages), page))
        row.pages.append(page)


def generate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    count: int,
    *,
    page_size: int,
    budget: int,
    slots: int,
    samplings: Sequence[SamplingSpec] | None = None,
    seed: int = 0,
) -> list[list[int]]:
    """Generate ``count`` tokens for each prompt, in mixed batches of at most ``budget`` tokens over ``slots`` slots."""
    driver = Driver(engine, page_size, seed)
    waiting = list(enumerate(prompts))[::-1]
    running: dict[int, Row] = {}
    free = list(range(slots))[::-1]
    done: dict[int, list[int]] = {}
    while waiting or running:
        while waiting and free:
            number, prompt = waiting.pop()
            running[number] = driver.open(free.pop(), prompt, samplings[number] if samplings else GREEDY)
        decodes = [(row, 1) for row in running.values() if row.output][:budget]
        parts, left = list(decodes), budget - len(decodes)
        for row in running.values():
            if not row.output and left > 0:
                parts.append((row, min(left, row.known - row.done)))
                left -= parts[-1][1]
        driver.step(parts, decode_rows=len(decodes))
        for number in [number for number, row in running.items() if len(row.output) == count]:
            row = running.pop(number)
            done[number] = row.output
            driver.release(row)
            free.append(row.slot)
    return [done[number] for number in range(len(prompts))]
