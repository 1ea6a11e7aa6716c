"""Attention backends against attention written out: any mix of rows, pages and heads."""

from dataclasses import dataclass

import kernel_device
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skiff_runtime.attention import torch_sdpa as torch_backend
from skiff_runtime.attention.base import AttentionBackend, AttentionBatch
from skiff_runtime.attention.hybrid import (
    LONG_CONTEXT,
    HybridAttention,
    Part,
    PrefillBySize,
    TritonDecode,
    TritonPrefill,
)
from skiff_runtime.attention.selector import make_backend
from skiff_runtime.attention.torch_sdpa import TorchSDPABackend
from skiff_runtime.errors import ConfigError
from skiff_runtime.kernels.kv_store import store_kv
from skiff_runtime.kvcache.kv_pool import KVLayout, KVPool

CPU = torch.device("cpu")
DIM = 8


@dataclass
class Case:
    """Rows of (cached tokens, new tokens) over shuffled pages, with their whole contexts' K and V."""

    rows: list[tuple[int, int]]
    page_size: int
    kv_heads: int
    group: int
    seed: int

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        torch.manual_seed(self.seed)
        pages = [-(-(cached + new) // self.page_size) for cached, new in self.rows]
        layout = KVLayout(2, self.kv_heads, DIM, self.page_size, torch.float32)
        self.pool = KVPool(layout, sum(pages) + 1, CPU)
        ids = iter(rng.permutation(sum(pages) + 1).tolist())
        self.table = torch.zeros((len(self.rows) + 2, max(pages) + 1), dtype=torch.int32)
        self.slots = torch.from_numpy(rng.permutation(len(self.rows) + 2)[: len(self.rows)])
        for slot, count in zip(self.slots.tolist(), pages, strict=True):
            self.table[slot, :count] = torch.tensor([next(ids) for _ in range(count)])
        self.contexts = [torch.randn(2, cached + new, self.kv_heads, DIM) for cached, new in self.rows]
        self.q = torch.randn(sum(new for _, new in self.rows), self.kv_heads * self.group, DIM)

    def places(self, row: int) -> torch.Tensor:
        """Where the row's tokens are in the flat pool."""
        positions = torch.arange(sum(self.rows[row]))
        pages = self.table[self.slots[row]][positions // self.page_size].long()
        return pages * self.page_size + positions % self.page_size

    def attend(
        self, layer: int, backend: AttentionBackend | None = None, decode_rows: int = 0
    ) -> torch.Tensor:
        """The backend's answer, with the cached part of every context put into the pool first."""
        for side in self.pool.tokens(layer):
            side[: self.pool.padding_slot_mapping] = torch.nan
        for number, (cached, _) in enumerate(self.rows):
            for side, values in zip(self.pool.tokens(layer), self.contexts[number], strict=True):
                side[self.places(number)[:cached]] = values[:cached]
        backend = backend or make_backend("torch", self.pool, query_heads=self.q.shape[1], longest=64)
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
        slot_mapping = torch.cat([self.places(i)[cached:] for i, (cached, _) in enumerate(self.rows)])
        store_kv(k, v, self.pool.tokens(layer), slot_mapping)
        into = torch.full_like(self.q, torch.nan)
        assert backend.forward(layer, self.q, into) is into
        assert torch.equal(backend.forward(layer, self.q), into)
        return into

    def batch(self, decode_rows: int) -> AttentionBatch:
        """The rows as the engine tells them."""
        starts, lengths = np.array(self.rows, dtype=np.int32).T
        offsets = np.cumsum(lengths, dtype=np.int32) - lengths
        rows = torch.from_numpy(np.stack((self.slots.int().numpy(), starts, lengths, offsets)))
        return AttentionBatch(
            starts=starts,
            lengths=lengths,
            decode_rows=decode_rows,
            rows=rows,
            contexts=rows[1] + rows[2],
            page_table=self.table,
        )

    def expected(self) -> torch.Tensor:
        """softmax(q k / sqrt(d)) v, query by query and head by head."""
        answers, at = [], 0
        for (cached, new), (keys, values) in zip(self.rows, self.contexts, strict=True):
            for position in range(cached, cached + new):
                for head in range(self.kv_heads * self.group):
                    seen = slice(0, position + 1), head // self.group
                    weights = torch.softmax(keys[seen] @ self.q[at, head] / DIM**0.5, 0)
                    answers.append(weights @ values[seen])
                at += 1
        return torch.stack(answers).view(at, -1, DIM)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), min_size=1, max_size=6),
    page_size=st.sampled_from([1, 3, 16, 64]),
    kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 4]),
    seed=st.integers(0, 1 << 20),
)
def test_any_mix_of_rows(
    rows: list[tuple[int, int]], page_size: int, kv_heads: int, group: int, seed: int
) -> None:
    """Memory that belongs to nobody in the batch is NaN here, so that reading it at all shows."""
    case = Case(rows, page_size, kv_heads, group, seed)
    torch.testing.assert_close(case.attend(1), case.expected())


def test_groups_and_blocks_of_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With small limits, rows split into several groups and a chunk into several blocks."""
    monkeypatch.setattr(torch_backend, "MIN_BUCKET", 4)
    monkeypatch.setattr(torch_backend, "GATHER_WORKSPACE_BYTES", 40 * 2 * 2 * DIM * 4)
    monkeypatch.setattr(torch_backend, "MAX_SCORES", 100)
    case = Case([(3, 1), (30, 1), (19, 1), (0, 1), (28, 1), (25, 20), (0, 30), (17, 1)], 4, 2, 2, seed=7)
    torch.testing.assert_close(case.attend(0), case.expected())


def test_no_more_is_put_together_than_memory_is_kept_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, keys and values; a context that alone is longer has a group of its own."""
    places = 64
    monkeypatch.setattr(torch_backend, "MIN_BUCKET", 4)
    monkeypatch.setattr(torch_backend, "GATHER_WORKSPACE_BYTES", places * 2 * 2 * DIM * 4)
    case = Case([(cached, 1) for cached in (20, 19, 20, 18, 15, 20, 90, 21)], 4, 2, 2, seed=8)
    backend = TorchSDPABackend(case.pool)
    backend.prepare(case.batch(0))
    sizes = sorted((len(group.queries), len(group.slot_mapping)) for group in backend._groups)
    assert sum(rows for rows, _ in sizes) == 8 and (1, 91) in sizes
    assert max(gathered for _, gathered in sizes if gathered != 91) in range(places // 2, places + 1)


@pytest.mark.skipif(kernel_device.DEVICE.type == "cuda", reason="the pool of these cases is on the CPU")
@pytest.mark.parametrize(
    "rows", [[(40, 1), (7, 1)], [(0, 20), (5, 9)], [(40, 1), (7, 1), (0, 20), (5, 9)]], ids=str
)
def test_decode_rows_beside_chunks(rows: list[tuple[int, int]]) -> None:
    """Each kind has its kernel, and writes its share of the result, in the first layer as in the next."""
    case = Case(rows, 3, 2, 2, seed=3)
    decode_rows = sum(new == 1 for _, new in rows)
    backend = HybridAttention(case.pool, TritonPrefill(case.pool), TritonDecode(case.pool, 4, 4096))
    for layer in (0, 1):
        torch.testing.assert_close(case.attend(layer, backend, decode_rows), case.expected())


class Noted(Part):
    """Writes its number, and knows how often it was told of a step."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.steps = 0

    def prepare(self, batch: AttentionBatch) -> None:
        self.steps += 1

    def forward(self, layer: int, q: torch.Tensor, into: torch.Tensor) -> None:
        into.fill_(self.number)


@pytest.mark.parametrize(
    ("starts", "lengths", "decode_rows", "expected"),
    [
        ([0, 0], [40, 60], 0, 1),
        ([0, 0], [40, 61], 0, 2),
        ([LONG_CONTEXT - 9], [8], 0, 1),
        ([LONG_CONTEXT - 8], [8], 0, 2),
        ([2 * LONG_CONTEXT, 5], [1, 100], 1, 1),
    ],
    ids=["few", "many", "not long", "long", "long rows that decode"],
)
def test_few_tokens_of_prompts_have_a_kernel_of_their_own(
    starts: list[int], lengths: list[int], decode_rows: int, expected: int
) -> None:
    few, many = Noted(1), Noted(2)
    prefill = PrefillBySize(few, many, most=100)
    table = torch.zeros((len(starts), 1), dtype=torch.int32)
    first, counts = np.array(starts, np.int32), np.array(lengths, np.int32)
    batch = AttentionBatch(first, counts, decode_rows, table, table[:, 0], table)
    prefill.prepare(batch)
    attended = torch.zeros(3)
    prefill.forward(0, attended, attended)
    assert attended.tolist() == [expected] * 3
    assert (few.steps, many.steps) == ((1, 0) if expected == 1 else (0, 1))


def test_an_unknown_backend_is_named() -> None:
    pool = KVPool(KVLayout(1, 1, DIM, 4, torch.float32), 1, CPU)
    with pytest.raises(ConfigError, match="--attention-backend nonsense is unknown"):
        make_backend("nonsense", pool, query_heads=1, longest=8)
