"""Attention backends against attention computed query by query, over any mix of rows, pages and heads."""

from dataclasses import dataclass, replace
from typing import Any

import kernel_device
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_contexts import PagedContexts, causal_attention

from skiff_runtime.attention import base, hybrid, torch_sdpa
from skiff_runtime.attention.base import AttentionBackend, AttentionBatch
from skiff_runtime.attention.hybrid import (
    HybridAttention,
    PhaseAttention,
    PrefillBySize,
    TritonDecode,
    TritonPrefill,
)
from skiff_runtime.attention.selector import make_backend
from skiff_runtime.attention.torch_sdpa import TorchSDPABackend
from skiff_runtime.engine.shared_prefix import pack_work_items
from skiff_runtime.errors import ConfigError
from skiff_runtime.kernels.kv_store import store_kv
from skiff_runtime.kernels.qk_norm_rope import RopeInputs
from skiff_runtime.kernels.shared_prefixes import unpack_shared_prefixes
from skiff_runtime.kernels.triton.attention.decode_attention import DecodeAttention
from skiff_runtime.kvcache.kv_pool import KVLayout, KVPool

CPU = torch.device("cpu")
DIM = 8
LONG = 4096
"""Context from which on prefill takes the implementation for large steps."""


@dataclass
class Case:
    """Rows of (cached tokens, new tokens) over shuffled pages, with the K and V of their whole contexts."""

    rows: list[tuple[int, int]]
    page_size: int
    kv_heads: int
    group: int
    seed: int
    windows: tuple[int | None, ...] = ()
    """Of the two layers; empty if they have none."""

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        torch.manual_seed(self.seed)
        pages = [-(-(cached + new) // self.page_size) for cached, new in self.rows]
        layout = KVLayout(2, self.kv_heads, DIM, self.page_size, torch.float32, self.windows)
        self.pool = KVPool(layout, sum(pages) + 1, CPU)
        ids = iter(rng.permutation(sum(pages) + 1).tolist())
        self.table = torch.zeros((len(self.rows) + 2, max(pages) + 1), dtype=torch.int32)
        self.slots = torch.from_numpy(rng.permutation(len(self.rows) + 2)[: len(self.rows)])
        for slot, count in zip(self.slots.tolist(), pages, strict=True):
            self.table[slot, :count] = torch.tensor([next(ids) for _ in range(count)])
        self.contexts = [torch.randn(2, cached + new, self.kv_heads, DIM) for cached, new in self.rows]
        self.q = torch.randn(sum(new for _, new in self.rows), self.kv_heads * self.group, DIM)

    def slot_mapping(self, row: int) -> torch.Tensor:
        """Return the KV offsets of the row's tokens."""
        positions = torch.arange(sum(self.rows[row]))
        pages = self.table[self.slots[row]][positions // self.page_size].long()
        return pages * self.page_size + positions % self.page_size

    def attend(
        self, layer: int, backend: AttentionBackend | None = None, decode_rows: int = 0
    ) -> torch.Tensor:
        """Compute attention by the backend, with the cached part of every context written to the pool first."""
        for side in self.pool.layer_kv(layer):
            side[: self.pool.padding_offset] = torch.nan
        for number, (cached, _) in enumerate(self.rows):
            for side, values in zip(self.pool.layer_kv(layer), self.contexts[number], strict=True):
                side[self.slot_mapping(number)[:cached]] = values[:cached]
        backend = backend or make_backend("torch", self.pool, query_heads=self.q.shape[1], max_model_len=64)
        backend.prepare(self.batch(decode_rows))
        k, v = (
            torch.cat(
                [
                    context[side, cached:]
                    for context, (cached, _) in zip(self.contexts, self.rows, strict=True)
                ]
            )
            for side in (0, 1)
        )
        slot_mapping = torch.cat([self.slot_mapping(i)[cached:] for i, (cached, _) in enumerate(self.rows)])
        store_kv(k, v, self.pool.layer_kv(layer), slot_mapping)
        out = torch.full_like(self.q, torch.nan)
        assert backend.forward(layer, self.q, out) is out
        assert torch.equal(backend.forward(layer, self.q), out)
        return out

    def batch(self, decode_rows: int) -> AttentionBatch:
        """Build the batch as the engine does."""
        starts, lengths = np.array(self.rows, dtype=np.int32).T
        offsets = np.cumsum(lengths, dtype=np.int32) - lengths
        rows = torch.from_numpy(np.stack((self.slots.int().numpy(), starts, lengths, offsets)))
        return AttentionBatch(
            starts=starts,
            lengths=lengths,
            decode_rows=decode_rows,
            rows=rows,
            seq_lens=rows[1] + rows[2],
            page_table=self.table,
        )

    def expected(self, layer: int = 0) -> torch.Tensor:
        """Compute softmax(q k / sqrt(d)) v, query by query and head by head."""
        window = self.pool.layout.window(layer)
        attended, at = [], 0
        for (cached, new), (keys, values) in zip(self.rows, self.contexts, strict=True):
            for position in range(cached, cached + new):
                for head in range(self.kv_heads * self.group):
                    first = 0 if window is None else max(0, position - window + 1)
                    visible = slice(first, position + 1), head // self.group
                    weights = torch.softmax(keys[visible] @ self.q[at, head] / DIM**0.5, 0)
                    attended.append(weights @ values[visible])
                at += 1
        return torch.stack(attended).view(at, -1, DIM)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), min_size=1, max_size=6),
    page_size=st.sampled_from([1, 3, 16, 64]),
    kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 4]),
    seed=st.integers(0, 1 << 20),
)
def test_any_mix_of_rows_equals_reference(
    rows: list[tuple[int, int]], page_size: int, kv_heads: int, group: int, seed: int
) -> None:
    """Memory that no row of the batch owns is NaN, so that any read of it shows."""
    case = Case(rows, page_size, kv_heads, group, seed)
    torch.testing.assert_close(case.attend(1), case.expected())


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), min_size=1, max_size=6),
    page_size=st.sampled_from([1, 3, 16, 64]),
    windows=st.tuples(*[st.none() | st.sampled_from([1, 2, 3, 16, 17, 32, 100])] * 2),
    group=st.sampled_from([1, 4]),
    max_scores=st.sampled_from([30, torch_sdpa.MAX_SCORES]),
    seed=st.integers(0, 1 << 20),
)
def test_each_layer_has_its_own_window(
    rows: list[tuple[int, int]],
    page_size: int,
    windows: tuple[int | None, int | None],
    group: int,
    max_scores: int,
    seed: int,
) -> None:
    """Blocks of a chunk's queries are small or not."""
    case = Case(rows, page_size, 2, group, seed, windows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_sdpa, "MAX_SCORES", max_scores)
        for layer in (0, 1):
            torch.testing.assert_close(case.attend(layer), case.expected(layer))


def test_window_bounds_what_is_gathered_and_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long context costs no more than its window, for a block of queries no more than twice that."""
    monkeypatch.setattr(torch_sdpa, "MIN_WINDOW_BLOCK", 8)
    case = Case([(900, 1), (700, 1), (500, 64)], 16, 1, 1, seed=9, windows=(24, 24))
    backend = TorchSDPABackend(case.pool)
    backend.prepare(case.batch(0))
    plan = backend._plans[24]
    assert max(len(group.slot_mapping) // len(group.queries) for group in plan.groups) == 24
    assert [len(chunk.slot_mapping) for chunk in plan.chunks] == [23 + 64]
    widths = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def record(q: torch.Tensor, k: torch.Tensor, *sides: Any, **options: Any) -> torch.Tensor:
        widths.append(k.shape[2])
        return attend(q, k, *sides, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", record)
    torch.testing.assert_close(case.attend(0, backend), case.expected())
    assert max(widths) <= 2 * 24


def test_decode_groups_and_query_blocks_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """With low limits, decode rows fall into several groups and a chunk into several blocks."""
    monkeypatch.setattr(torch_sdpa, "MIN_BUCKET", 4)
    monkeypatch.setattr(torch_sdpa, "GATHER_WORKSPACE_BYTES", 40 * 2 * 2 * DIM * 4)
    monkeypatch.setattr(torch_sdpa, "MAX_SCORES", 100)
    case = Case([(3, 1), (30, 1), (19, 1), (0, 1), (28, 1), (25, 20), (0, 30), (17, 1)], 4, 2, 2, seed=7)
    torch.testing.assert_close(case.attend(0), case.expected())


def test_gathered_kv_stays_within_the_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit counts K and V in float32; a longer context has a group of its own."""
    max_tokens = 64
    monkeypatch.setattr(torch_sdpa, "MIN_BUCKET", 4)
    monkeypatch.setattr(torch_sdpa, "GATHER_WORKSPACE_BYTES", max_tokens * 2 * 2 * DIM * 4)
    case = Case([(cached, 1) for cached in (20, 19, 20, 18, 15, 20, 90, 21)], 4, 2, 2, seed=8)
    backend = TorchSDPABackend(case.pool)
    backend.prepare(case.batch(0))
    sizes = sorted((len(group.queries), len(group.slot_mapping)) for group in backend._plans[None].groups)
    assert sum(rows for rows, _ in sizes) == 8 and (1, 91) in sizes
    assert max(gathered for _, gathered in sizes if gathered != 91) in range(max_tokens // 2, max_tokens + 1)


@pytest.mark.skipif(kernel_device.DEVICE.type == "cuda", reason="the pool of these cases is on the CPU")
@pytest.mark.parametrize(
    "rows", [[(40, 1), (7, 1)], [(0, 20), (5, 9)], [(40, 1), (7, 1), (0, 20), (5, 9)]], ids=str
)
@pytest.mark.parametrize("windows", [(), (None, 5), (5, 12), (7, 7)], ids=str)
def test_hybrid_splits_decode_and_prefill_rows(
    rows: list[tuple[int, int]], windows: tuple[int | None, ...]
) -> None:
    """Each phase has its kernel and writes its part of the result, in the first layer and in the next one."""
    case = Case(rows, 3, 2, 2, seed=3, windows=windows)
    decode_rows = sum(new == 1 for _, new in rows)
    backend = HybridAttention(case.pool, TritonPrefill(case.pool), TritonDecode(case.pool, 4, 4096))
    for layer in (0, 1):
        torch.testing.assert_close(case.attend(layer, backend, decode_rows), case.expected(layer))


@pytest.mark.skipif(kernel_device.DEVICE.type == "cuda", reason="the pool of these cases is on the CPU")
@pytest.mark.parametrize(
    ("rows", "early"), [([(40, 1)], True), ([(40, 1), (5, 9)], False), ([(40, 1), (7, 1)], False)], ids=str
)
def test_tables_are_loaded_early_only_in_steps_of_one_token(
    rows: list[tuple[int, int]], early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind others, the kernels that write the tables may still run."""
    found = []

    def record(*given: Any, early_tables: bool, **options: Any) -> DecodeAttention:
        found.append(early_tables)
        return DecodeAttention(*given, early_tables=early_tables, **options)

    monkeypatch.setattr(hybrid, "DecodeAttention", record)
    case = Case(rows, 3, 2, 2, seed=3, windows=(None, 5))
    backend = HybridAttention(case.pool, TritonPrefill(case.pool), TritonDecode(case.pool, 4, 4096))
    for layer in (0, 1):
        torch.testing.assert_close(
            case.attend(layer, backend, sum(new == 1 for _, new in rows)), case.expected(layer)
        )
    assert found and set(found) == {early}


def test_prefixes_are_shared_only_if_a_layer_has_full_attention() -> None:
    for windows, shares in (((), True), ((None, 5), True), ((5, 5), False)):
        case = Case([(40, 1)], 3, 2, 2, seed=3, windows=windows)
        backend = HybridAttention(case.pool, TritonPrefill(case.pool), TritonDecode(case.pool, 4, 4096))
        assert (backend.shared_prefix_rows > 0) is shares


@pytest.mark.skipif(kernel_device.DEVICE.type == "cuda", reason="the contexts are on the CPU")
def test_decode_rows_share_prefixes_in_layers_with_full_attention() -> None:
    """The same step, in a layer that reads the prefix once for both rows, and in one where each reads its window."""
    torch.manual_seed(5)
    contexts = [torch.randn(2, length, 1, 16) for length in (50, 41)]
    contexts[1][:, :32] = contexts[0][:, :32]
    paged = PagedContexts(contexts, 16, windows=(None, 20))
    zeros, tokens = np.zeros(2, np.int32), np.full(2, 32, np.int32)
    packed = pack_work_items(zeros, tokens, max_rows=2, rows=2, min_split_tokens=256)
    shared = unpack_shared_prefixes(torch.from_numpy(packed), 2)
    decode = TritonDecode(paged.pool, 2, 4096)
    decode.prepare(replace(paged.batch([49, 40], [1, 1], decode_rows=2), shared_prefixes=shared))
    q = torch.randn(2, 2, 16)
    for layer, window in enumerate((None, 20)):
        out = torch.full_like(q, torch.nan)
        decode.forward(layer, q, out)
        for row, (keys, values) in enumerate(contexts):
            one = slice(row, row + 1)
            assert kernel_device.error(out[one], causal_attention(q[one], keys, values, window)) < 1e-5


class Recorder(PhaseAttention):
    """Writes its number, and counts the steps that it prepares."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.steps = 0

    def prepare(self, batch: AttentionBatch) -> None:
        self.steps += 1

    def forward(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        out.fill_(self.number)


@pytest.mark.parametrize(
    ("starts", "lengths", "decode_rows", "expected"),
    [
        ([0, 0], [40, 60], 0, 1),
        ([0, 0], [40, 61], 0, 2),
        ([LONG - 9], [8], 0, 1),
        ([LONG - 8], [8], 0, 2),
        ([2 * LONG, 5], [1, 100], 1, 1),
    ],
    ids=["small", "large", "short context", "long context", "long decode row"],
)
def test_prefill_by_size_chooses_by_tokens_and_context(
    starts: list[int], lengths: list[int], decode_rows: int, expected: int
) -> None:
    small, large = Recorder(1), Recorder(2)
    prefill = PrefillBySize(small, large, max_small_tokens=100, long_context=LONG)
    table = torch.zeros((len(starts), 1), dtype=torch.int32)
    first, counts = np.array(starts, np.int32), np.array(lengths, np.int32)
    batch = AttentionBatch(first, counts, decode_rows, table, table[:, 0], table)
    prefill.prepare(batch)
    attended = torch.zeros(3)
    prefill.forward(0, attended, attended)
    assert attended.tolist() == [expected] * 3
    assert (small.steps, large.steps) == ((1, 0) if expected == 1 else (0, 1))


def test_unknown_backend_is_refused_by_name() -> None:
    pool = KVPool(KVLayout(1, 1, DIM, 4, torch.float32), 1, CPU)
    with pytest.raises(ConfigError, match="--attention-backend nonsense is unknown"):
        make_backend("nonsense", pool, query_heads=1, max_model_len=8)


@pytest.mark.parametrize(
    ("rows", "options", "fused"),
    [
        (1, {}, True),
        (2, {}, True),
        (3, {}, False),
        (1, {"new": 4}, False),
        (1, {"prefill": True}, False),
        (2, {"shares": True}, False),
        (1, {"expands": True}, False),
        (1, {"dtype": torch.float8_e4m3fn}, False),
        (1, {"group": 9}, False),
        (1, {"dim": 256}, False),
    ],
)
def test_qk_norm_and_rope_are_a_part_of_attention_in_decode_steps_of_few_rows(
    monkeypatch: pytest.MonkeyPatch, rows: int, options: dict[str, Any], fused: bool
) -> None:
    """Not with prompts, shared prefixes or LoRA behind the product, an FP8 cache, or many or wide heads."""
    group, dim = options.get("group", 2), options.get("dim", 16)
    pool = KVPool(KVLayout(1, 1, dim, 4, options.get("dtype", torch.float32)), 4, CPU)
    decode = TritonDecode(pool, group, 64)
    backend = HybridAttention(pool, Recorder(0), decode)
    tokens = rows + options.get("new", 0)
    lengths = np.array([*[1] * rows, *([options["new"]] if "new" in options else [])], np.int32)
    table = torch.zeros((4, 4), dtype=torch.int32)
    numbers = torch.zeros((4, len(lengths)), dtype=torch.int32)
    batch = AttentionBatch(
        np.zeros_like(lengths),
        lengths,
        0 if "prefill" in options else rows,
        numbers,
        numbers[0],
        table,
        shared_prefixes=object() if "shares" in options else None,  # type: ignore[arg-type]
    )
    calls = []

    class Fused:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def __call__(self, qkv: torch.Tensor, *_: Any) -> torch.Tensor:
            calls.append("fused")
            return qkv.new_zeros((len(qkv), group, dim))

    def store(qkv: torch.Tensor, *_: Any) -> torch.Tensor:
        calls.append("stored")
        return qkv.new_zeros((len(qkv), group, dim))

    monkeypatch.setattr(hybrid, "FusedDecodeAttention", Fused)
    monkeypatch.setattr(base, "qk_norm_rope_store_kv", store)
    monkeypatch.setattr(decode, "forward", lambda *_: None)
    backend.prepare(batch)
    qkv = torch.zeros(tokens, (group + 2) * dim)
    rope = RopeInputs(qkv, numbers[0], numbers[0])
    expand: Any = object() if "expands" in options else None
    attended = backend.forward_qkv(0, qkv, rope, None, 0.0, expand)
    assert calls == ["fused" if fused else "stored"]
    assert attended.shape == (tokens, group, dim)
