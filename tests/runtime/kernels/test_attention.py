"""The attention kernels against float64, over shuffled pages: in Triton's interpreter, or on a GPU."""

from typing import Any

import numpy as np
import pytest
import torch
from kernel_device import DEVICE, HALF, TOLERANCE, error, noise, poison
from paged_contexts import causal_attention
from pairwise import mark_beyond_values

from skiff_runtime.engine.shared_prefix import pack_work_items
from skiff_runtime.kernels.fp8_tensors import E4M3
from skiff_runtime.kernels.qk_norm_rope import RopeInputs
from skiff_runtime.kernels.shared_prefixes import packed_size, unpack_shared_prefixes
from skiff_runtime.kernels.triton.attention.decode_attention import (
    DecodeAttention,
    DecodeRows,
    find_row_counts_by_variant,
)
from skiff_runtime.kernels.triton.attention.fused_decode_attention import FusedDecodeAttention
from skiff_runtime.kernels.triton.attention.prefill_attention import PrefillAttention
from skiff_runtime.kernels.triton.attention.qk_norm_rope import qk_norm_rope_store_kv
from skiff_runtime.kernels.triton.runtime.cached_launch import LayerKV

pytestmark = pytest.mark.usefixtures("poisoned")


class Paged:
    """Contexts of ``lengths`` tokens in a pool whose other places are NaN."""

    def __init__(
        self, lengths: list[int], *, page_size: int, kv: int, dim: int, dtype: torch.dtype, seed: int
    ) -> None:
        rng = np.random.default_rng(seed)
        self.page_size, self.kv, self.dim = page_size, kv, dim
        page_counts = [-(-length // page_size) for length in lengths]
        total = sum(page_counts) + 3
        ids = iter(rng.permutation(total).tolist())
        self.slots = torch.from_numpy(rng.permutation(len(lengths) + 2)[: len(lengths)].astype(np.int32))
        self.page_table = torch.zeros(len(lengths) + 2, max(page_counts) + 1, dtype=torch.int32)
        shape = (total * page_size, kv, dim)
        sides = tuple(poison(torch.empty(shape, dtype=dtype)) for _ in range(2))
        generator = torch.Generator().manual_seed(seed)
        self.contexts = []
        for slot, length, count in zip(self.slots.tolist(), lengths, page_counts, strict=True):
            self.page_table[slot, :count] = torch.tensor([next(ids) for _ in range(count)])
            positions = torch.arange(length)
            pages = self.page_table[slot][positions // page_size].long()
            places = pages * page_size + positions % page_size
            context = torch.randn(2, length, kv, dim, generator=generator).to(dtype)
            sides[0][places], sides[1][places] = context
            self.contexts.append(context.double())
        self.pool = sides[0].to(DEVICE), sides[1].to(DEVICE)

    def share(self, groups: np.ndarray, tokens: np.ndarray) -> None:
        """Give all rows of a group the pages of its first row, for their first ``tokens``, which are whole pages."""
        for row, (group, count) in enumerate(zip(groups, tokens, strict=True)):
            leader = int(np.argmax(groups == group))
            pages = int(count) // self.page_size
            source, target = int(self.slots[leader]), int(self.slots[row])
            self.page_table[target, :pages] = self.page_table[source, :pages]
            self.contexts[row][:, :count] = self.contexts[leader][:, :count]

    def place(self, row: int, position: int) -> int:
        """Return where in the pool a token's K and V are."""
        page = int(self.page_table[self.slots[row]][position // self.page_size])
        return page * self.page_size + position % self.page_size

    def hide_newest(self) -> LayerKV:
        """Return a copy of the pool in which each row's last token is NaN, too."""
        sides = self.pool[0].clone(), self.pool[1].clone()
        for row, context in enumerate(self.contexts):
            for side in sides:
                side[self.place(row, context.shape[1] - 1)] = torch.nan
        return sides

    def hide(self, ends: list[int]) -> LayerKV:
        """Return a pool in which the tokens of each row before its end are NaN, too."""
        sides = self.pool[0].clone(), self.pool[1].clone()
        for slot, end in zip(self.slots.tolist(), ends, strict=True):
            positions = torch.arange(end)
            pages = self.page_table[slot][positions // self.page_size].long()
            for side in sides:
                side[(pages * self.page_size + positions % self.page_size).to(DEVICE)] = torch.nan
        return sides

    def expected(self, q: torch.Tensor, starts: list[int], window: int | None = None) -> torch.Tensor:
        """Return the attention of each row's tokens from ``starts`` on, row after row; q is [T, heads, d]."""
        counts = [context.shape[1] - start for context, start in zip(self.contexts, starts, strict=True)]
        rows = zip(torch.split(q, counts), self.contexts, strict=True)
        return torch.cat([causal_attention(row, keys, values, window) for row, (keys, values) in rows])


def decode(queries: torch.Tensor, pool: LayerKV, *tables: Any, **options: Any) -> torch.Tensor:
    """Attend in one layer, by launches made for it alone."""
    output = poison(torch.empty_like(queries))
    DecodeAttention(queries, pool, DecodeRows(*tables), **options)(queries, pool, output)
    return output


CASES = [
    (1, 2, 1, 16, torch.float32),
    (16, 1, 5, 24, HALF),
    (3, 2, 2, 64, HALF),
    (2, 1, 9, 32, HALF),
    (4, 1, 17, 16, HALF),
]
"""Page size, KV heads, query heads of each, dimensions, type. Up to eight query heads take the loop with tokens
first."""
CASES_WITH_KV_DTYPE = [
    *((*case, case[-1]) for case in CASES),
    (1, 2, 1, 16, torch.float32, E4M3),
    (5, 2, 3, 40, HALF, E4M3),
    (4, 1, 2, 16, HALF, E4M3),
    (2, 1, 17, 32, HALF, E4M3),
]
"""The same, with the type of the cache."""
WHOLE_AND_SPLIT = [(*case, 1) for case in CASES_WITH_KV_DTYPE[::4]] + [
    (*case, 1 << 12) for case in CASES_WITH_KV_DTYPE
]
"""The same, with the longest context: one program attends to all of it, or several to a part each."""


@pytest.mark.parametrize("page_size, kv, group, dim, dtype, kv_dtype, max_seq_len", WHOLE_AND_SPLIT, ids=str)
def test_decode_attention(
    page_size: int, kv: int, group: int, dim: int, dtype: torch.dtype, kv_dtype: torch.dtype, max_seq_len: int
) -> None:
    lengths = [1, 130, 64, 17]
    paged = Paged(lengths, page_size=page_size, kv=kv, dim=dim, dtype=kv_dtype, seed=dim)
    q = torch.randn(len(lengths), kv * group, dim, generator=torch.Generator().manual_seed(1)).to(dtype)
    output = decode(
        q.to(DEVICE),
        paged.pool,
        paged.slots.to(DEVICE),
        paged.page_table.to(DEVICE),
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        page_size,
        max_seq_len=max_seq_len,
    )
    assert error(output, paged.expected(q, [length - 1 for length in lengths])) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("page_size, kv, group, dim, dtype, kv_dtype, max_seq_len", WHOLE_AND_SPLIT, ids=str)
def test_decode_attention_with_shared_prefixes(
    page_size: int, kv: int, group: int, dim: int, dtype: torch.dtype, kv_dtype: torch.dtype, max_seq_len: int
) -> None:
    """Two groups, one larger than a work item, beside a row of its own and a long one that is split."""
    lengths = [99, 170, 40, 97, 145, 98, 200, 330]
    groups = np.array([1, 0, 2, 1, 0, 1, 0, 7], np.int32)
    tokens = np.array([96, 144, 0, 96, 144, 96, 144, 320], np.int32) // page_size * page_size
    paged = Paged(lengths, page_size=page_size, kv=kv, dim=dim, dtype=kv_dtype, seed=dim)
    paged.share(groups, tokens)
    q = torch.randn(len(lengths), kv * group, dim, generator=torch.Generator().manual_seed(1)).to(dtype)
    packed = pack_work_items(groups, tokens, max_rows=2, rows=len(lengths), min_split_tokens=256)
    output = decode(
        q.to(DEVICE),
        paged.pool,
        paged.slots.to(DEVICE),
        paged.page_table.to(DEVICE),
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        page_size,
        max_seq_len=max_seq_len,
        shared=unpack_shared_prefixes(torch.from_numpy(packed).to(DEVICE), len(lengths)),
    )
    assert error(output, paged.expected(q, [length - 1 for length in lengths])) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("page_size, kv, group, dim, dtype", CASES[::4], ids=str)
def test_launch_is_repeated_for_other_layers_and_alignments(
    page_size: int, kv: int, group: int, dim: int, dtype: torch.dtype
) -> None:
    lengths = [30, 7, 300]
    paged = Paged(lengths, page_size=page_size, kv=kv, dim=dim, dtype=dtype, seed=dim + 2)
    tables = paged.slots.to(DEVICE), paged.page_table.to(DEVICE)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    generator = torch.Generator().manual_seed(1)
    first = torch.randn(len(lengths), kv * group, dim, generator=generator).to(dtype)
    decode_rows = DecodeRows(*tables, seq_lens, page_size)
    attend = DecodeAttention(first.to(DEVICE), paged.pool, decode_rows, max_seq_len=1 << 12)
    doubled = 2 * paged.pool[0], 2 * paged.pool[1]
    for q, pool, factor in (
        (first, paged.pool, 1),
        (first.flip(0), paged.pool, 1),
        (first / 2, doubled, 2),
        (first / 2, (misalign(doubled[0]), misalign(doubled[1])), 2),
        (first.flip(0), paged.pool, 1),
    ):
        output = poison(torch.empty(q.shape, dtype=dtype)).to(DEVICE)
        attend(q.to(DEVICE), pool, output)
        expected = factor * paged.expected(factor * q, [length - 1 for length in lengths])
        assert error(output / factor, expected / factor) < 2 * TOLERANCE[dtype]


def misalign(side: torch.Tensor) -> torch.Tensor:
    """Return a copy that begins one element behind an address divisible by 16."""
    buffer = torch.empty(side.numel() + 1, dtype=side.dtype, device=side.device)
    return buffer[1:].view(side.shape).copy_(side)


@pytest.mark.parametrize("page_size, kv, group, dim, dtype", CASES, ids=str)
def test_prefill_attention(page_size: int, kv: int, group: int, dim: int, dtype: torch.dtype) -> None:
    """Chunks have cached tokens before them or none; two tokens of the step are not among the queries."""
    lengths, starts = [40, 139, 30], [0, 9, 29]
    paged = Paged(lengths, page_size=page_size, kv=kv, dim=dim, dtype=dtype, seed=dim + 1)
    counts = np.subtract(lengths, starts)
    q = torch.randn(counts.sum(), kv * group, dim, generator=torch.Generator().manual_seed(1)).to(dtype)
    rows = np.stack((paged.slots.numpy(), starts, counts, np.cumsum(counts) - counts + 2)).astype(np.int32)
    queries = q.to(DEVICE)
    output = poison(torch.empty_like(queries))
    tables = torch.from_numpy(rows).to(DEVICE), paged.page_table.to(DEVICE)
    attend = PrefillAttention(
        queries, paged.pool, *tables, page_size, max_chunk_len=int(counts.max()), skipped=2
    )
    attend(queries, paged.pool, output)
    assert error(output, paged.expected(q, starts)) < 2 * TOLERANCE[dtype]


WINDOWS = (1, 3, 32, 70, 1000)
"""Of one token, shorter than a page, of whole pages, and longer than most or all contexts."""


@pytest.mark.parametrize(
    "case, window, max_seq_len", mark_beyond_values(CASES_WITH_KV_DTYPE, WINDOWS, [1, 1 << 12]), ids=str
)
def test_decode_attention_reads_only_the_window(
    case: tuple[int, int, int, int, torch.dtype, torch.dtype], window: int, max_seq_len: int
) -> None:
    """The tokens before the window are NaN. With the longest context, one program attends to a row, or several do."""
    page_size, kv, group, dim, dtype, kv_dtype = case
    lengths = [1, 130, 64, 17]
    paged = Paged(lengths, page_size=page_size, kv=kv, dim=dim, dtype=kv_dtype, seed=dim)
    q = torch.randn(len(lengths), kv * group, dim, generator=torch.Generator().manual_seed(1)).to(dtype)
    output = decode(
        q.to(DEVICE),
        paged.hide([max(0, length - window) for length in lengths]),
        paged.slots.to(DEVICE),
        paged.page_table.to(DEVICE),
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        page_size,
        max_seq_len=max_seq_len,
        window=window,
    )
    expected = paged.expected(q, [length - 1 for length in lengths], window)
    assert error(output, expected) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("case, window", mark_beyond_values(CASES, WINDOWS), ids=str)
def test_prefill_attention_reads_only_the_window(
    case: tuple[int, int, int, int, torch.dtype], window: int
) -> None:
    """The tokens before the window of a chunk's first token are NaN. One chunk is longer than a block of queries."""
    page_size, kv, group, dim, dtype = case
    lengths, starts = [40, 339, 30], [0, 150, 29]
    paged = Paged(lengths, page_size=page_size, kv=kv, dim=dim, dtype=dtype, seed=dim + 1)
    counts = np.subtract(lengths, starts)
    q = torch.randn(counts.sum(), kv * group, dim, generator=torch.Generator().manual_seed(1)).to(dtype)
    rows = np.stack((paged.slots.numpy(), starts, counts, np.cumsum(counts) - counts + 2)).astype(np.int32)
    queries, pool = q.to(DEVICE), paged.hide([max(0, start - window + 1) for start in starts])
    output = poison(torch.empty_like(queries))
    tables = torch.from_numpy(rows).to(DEVICE), paged.page_table.to(DEVICE)
    attend = PrefillAttention(
        queries, pool, *tables, page_size, max_chunk_len=int(counts.max()), skipped=2, window=window
    )
    attend(queries, pool, output)
    assert error(output, paged.expected(q, starts, window)) < 2 * TOLERANCE[dtype]


def test_window_beyond_every_context_changes_no_bit() -> None:
    """A window of one token returns the value of the token itself."""
    lengths = [150, 70]
    paged = Paged(lengths, page_size=16, kv=1, dim=16, dtype=torch.float32, seed=3)
    q = torch.randn(2, 2, 16, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    tables = paged.slots.to(DEVICE), paged.page_table.to(DEVICE)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    full, wide, own = (
        decode(q, paged.pool, *tables, seq_lens, 16, max_seq_len=150, window=window)
        for window in (None, 150, 1)
    )
    assert torch.equal(full, wide)
    last = torch.stack([context[1, -1] for context in paged.contexts]).expand(2, 2, 16)
    assert torch.equal(own.cpu().double(), last)


FUSED_CASES = [
    (1, 2, 1, 16, torch.float32, False, None, 1),
    (16, 1, 5, 24, HALF, True, None, 1 << 12),
    (3, 2, 2, 64, HALF, False, 40, 1 << 12),
    (4, 1, 8, 128, HALF, True, 100, 1),
    (5, 2, 3, 40, torch.float32, True, None, 1 << 12),
    (16, 1, 2, 96, HALF, True, 530, 1 << 12),
]
"""Page size, KV heads, query heads of each, dimensions, type, whether heads are normalized, window, longest context."""


@pytest.mark.parametrize(
    "page_size, kv, group, dim, dtype, normed, window, max_seq_len", FUSED_CASES, ids=str
)
def test_fused_decode_attention_does_what_two_launches_do(
    page_size: int,
    kv: int,
    group: int,
    dim: int,
    dtype: torch.dtype,
    normed: bool,
    window: int | None,
    max_seq_len: int,
) -> None:
    """Also for a row of padding, whose K and V go nowhere; what was at the newest tokens' places before is not read.

    On a GPU the two sum the squares of a head in another order, so that a rounding can differ.
    """
    lengths = [1, 130, 64, 17, 65, 200 if window != 530 else 700]
    paged = Paged(lengths, page_size=page_size, kv=kv, dim=dim, dtype=dtype, seed=dim)
    pool, other = paged.hide_newest(), paged.hide_newest()
    places = torch.tensor([paged.place(row, length - 1) for row, length in enumerate(lengths)], device=DEVICE)
    places[2] = -1
    rows, seq_lens = len(lengths), torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    qkv = noise(rows, kv * (group + 2) * dim, dtype=dtype)
    weights = noise(2, dim, dtype=dtype, seed=4) if normed else None
    angles = torch.linspace(-3, 3, 704 * dim // 2).view(704, dim // 2)
    cos, sin = angles.cos(), angles.sin()
    table = torch.stack((torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)), 1)
    rope = RopeInputs(table.to(DEVICE, dtype), seq_lens - 1, places)
    decode_rows = DecodeRows(paged.slots.to(DEVICE), paged.page_table.to(DEVICE), seq_lens, page_size)
    options: dict[str, Any] = {"max_seq_len": max_seq_len, "window": window}
    fused = FusedDecodeAttention(qkv, pool, decode_rows, rope, 1e-6 if normed else None, **options)(
        qkv, weights, pool
    )
    q = qk_norm_rope_store_kv(qkv, rope.cos_sin, rope.positions, weights, 1e-6, other, places)
    rounding = 0 if DEVICE.type == "cpu" else 4 * torch.finfo(dtype).eps
    for side, expected in zip(pool, other, strict=True):
        torch.testing.assert_close(side, expected, rtol=rounding, atol=rounding, equal_nan=True)
    expected = decode(q, other, decode_rows.slots, decode_rows.page_table, seq_lens, page_size, **options)
    real = [row for row in range(rows) if row != 2]
    assert error(fused[real], expected[real].double()) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("has_prefixes", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 8, 10, 32])
def test_row_counts_by_variant_cover_every_kernel_of_mixed_steps(kv_heads: int, has_prefixes: bool) -> None:
    """Steps with any number of decode rows launch kernels that one of the listed numbers launches, too."""

    def list_options(rows: int) -> tuple[Any, ...]:
        queries = torch.empty(rows, 2 * kv_heads, 64, dtype=torch.bfloat16)
        pool = tuple(torch.empty(0, kv_heads, 64, dtype=torch.bfloat16) for _ in range(2))
        ints = torch.empty(rows, 4, dtype=torch.int32)
        packed = torch.empty(packed_size(rows), dtype=torch.int32)
        shared = unpack_shared_prefixes(packed, rows) if has_prefixes else None
        tables = DecodeRows(ints[:, 0], ints, ints[:, 0], 16)
        attend = DecodeAttention(queries, (pool[0], pool[1]), tables, max_seq_len=4096, shared=shared)
        merge = attend._merge._launch
        launches = [attend._attend_to_rows, *([] if merge is None else [merge])]
        launches += [attend._attend_to_prefixes] if has_prefixes else []
        return tuple(each._options[name] for each in launches for name in sorted(each._options))

    dtype = torch.bfloat16
    listed = find_row_counts_by_variant(
        torch.device("cpu"), 256, kv_heads, 4096, dtype, dtype, 64, shared=has_prefixes
    )
    assert {list_options(rows) for rows in range(1 + has_prefixes, 257)} == {
        list_options(rows) for rows in listed
    }
    assert len({list_options(rows) for rows in listed}) == len(listed) < 12


def test_results_are_bitwise_the_same_for_every_page_size() -> None:
    outputs = []
    for page_size in (1, 16, 64):
        paged = Paged([150, 70], page_size=page_size, kv=1, dim=16, dtype=torch.float32, seed=3)
        q = torch.randn(2, 2, 16, generator=torch.Generator().manual_seed(1))
        tables = paged.slots.to(DEVICE), paged.page_table.to(DEVICE)
        seq_lens = torch.tensor([150, 70], dtype=torch.int32, device=DEVICE)
        outputs.append(decode(q.to(DEVICE), paged.pool, *tables, seq_lens, page_size, max_seq_len=600).cpu())
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])
