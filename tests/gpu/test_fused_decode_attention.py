"""Decode attention with QK norm and RoPE in its launch, replayed step after step between the products beside it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import generate, make_engine
from kernel_device import TOLERANCE, error
from tiny_models import make_model

from skiff_runtime.attention import hybrid
from skiff_runtime.kernels.linear import linear
from skiff_runtime.kernels.qk_norm_rope import RopeInputs, qk_norm_rope_store_kv
from skiff_runtime.kernels.triton.attention.decode_attention import DecodeAttention, DecodeRows
from skiff_runtime.kernels.triton.attention.fused_decode_attention import FusedDecodeAttention
from skiff_runtime.kernels.tuning import overridden, tuning_for

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
DTYPE = torch.bfloat16
LAYERS, KV_HEADS, GROUP, DIM, HIDDEN = 4, 4, 8, 128, 1024
PAGE, STEPS, MAX_LEN = 16, 300, 512
EPS = 1e-6


class Steps:
    """A chain of layers over KV caches of its own, which are NaN where no step has stored anything."""

    def __init__(self, rows: int, *, fused: bool) -> None:
        generator = torch.Generator(DEVICE).manual_seed(rows)

        def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(shape, generator=generator, device=DEVICE) * scale).to(DTYPE)

        heads = KV_HEADS * GROUP
        self._fused = fused
        self._inputs = normal(STEPS, rows, HIDDEN)
        self._qkv = normal(LAYERS, (heads + 2 * KV_HEADS) * DIM, HIDDEN, scale=HIDDEN**-0.5)
        self._output = normal(LAYERS, HIDDEN, heads * DIM, scale=(heads * DIM) ** -0.5)
        self._norm = normal(2, DIM)
        angles = torch.linspace(0, 50, MAX_LEN * DIM // 2, device=DEVICE).view(MAX_LEN, DIM // 2)
        cos, sin = angles.cos(), angles.sin()
        self._cos_sin = torch.stack((torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)), 1).to(DTYPE)
        pages = rows * MAX_LEN // PAGE
        self._table = torch.randperm(pages, generator=generator, device=DEVICE).int().view(rows, -1)
        self._slots = torch.arange(rows, dtype=torch.int32, device=DEVICE)
        self._seq_lens = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
        self._step = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        shape = LAYERS, 2, pages * PAGE, KV_HEADS, DIM
        self.caches = torch.full(shape, torch.nan, dtype=DTYPE, device=DEVICE)
        self.results = torch.empty(STEPS, rows, HIDDEN, dtype=DTYPE, device=DEVICE)

    def run(self) -> None:
        """Compute one step from what the one before has left."""
        self._seq_lens.add_(1)
        positions = self._seq_lens - 1
        columns = (positions // PAGE).long()[:, None]
        places = self._table.gather(1, columns)[:, 0].long() * PAGE + positions % PAGE
        rope = RopeInputs(self._cos_sin, positions, places)
        rows = DecodeRows(self._slots, self._table, self._seq_lens, PAGE)
        x = self._inputs.index_select(0, self._step)[0]
        for layer in range(LAYERS):
            keys, values = self.caches[layer]
            qkv = linear(x, self._qkv[layer])
            if self._fused:
                fused = FusedDecodeAttention(qkv, (keys, values), rows, rope, EPS, max_seq_len=MAX_LEN)
                attended = fused(qkv, self._norm, (keys, values))
            else:
                q = qk_norm_rope_store_kv(
                    *(qkv, self._cos_sin, positions, self._norm, EPS, (keys, values), places)
                )
                attended = torch.empty_like(q)
                attend = DecodeAttention(q, (keys, values), rows, max_seq_len=MAX_LEN)
                attend(q, (keys, values), attended)
            x = linear(attended.flatten(1), self._output[layer])
        self.results.index_copy_(0, self._step, x[None])
        self._step.add_(1)


@pytest.mark.parametrize("rows", [1, 2])
@torch.inference_mode()
def test_replayed_steps_read_what_earlier_ones_stored(rows: int) -> None:
    """Programs load K and V before the kernel ahead has ended; whatever was not there yet would be NaN."""
    expected, found = Steps(rows, fused=False), Steps(rows, fused=True)
    for _ in range(STEPS):
        expected.run()
    found.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found.run()
    for _ in range(STEPS - 1):
        graph.replay()
    stored = ~expected.caches.isnan()
    assert torch.equal(stored, ~found.caches.isnan())
    assert error(found.results, expected.results.double()) < 8 * TOLERANCE[DTYPE]
    assert error(found.caches[stored], expected.caches[stored].double()) < 8 * TOLERANCE[DTYPE]


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_engine_generates_the_tokens_of_separate_launches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, rows: int
) -> None:
    """With the model's own embedding between the tables and the layers, in graphs, over pages that are used again."""
    launched = []

    class Counting(FusedDecodeAttention):
        def __call__(self, *given: Any) -> torch.Tensor:
            launched.append(len(given[0]))
            return super().__call__(*given)

    monkeypatch.setattr(hybrid, "FusedDecodeAttention", Counting)
    path = make_model(tmp_path, family)
    prompts = [[5 + (7 * number + index) % 200 for index in range(3 + number)] for number in range(6)]
    tuning = tuning_for(DEVICE)
    separate = replace(tuning, decode_attention=replace(tuning.decode_attention, max_fused_rows=0))
    found = []
    for numbers in (tuning, separate):
        with overridden(numbers):
            engine = make_engine(
                path,
                attention_backend="triton",
                dtype="float32",
                page_size=PAGE,
                max_running_requests=rows,
                max_total_tokens=rows * 8 * PAGE,
            )
            try:
                engine.warmup()
                found.append(generate(engine, prompts, 60, page_size=PAGE, budget=64, slots=rows))
            finally:
                engine.close()
        assert set(launched) == (set(range(1, rows + 1)) if numbers is tuning else set())
        launched.clear()
    assert found[0] == found[1]
