"""The attention kernels against attention written out in float64, over shuffled pages of any size."""

from typing import Any

import numpy as np
import pytest
import torch
from kernel_device import DEVICE, TOLERANCE, error, poison
from paged_contexts import causal_attention

from skiff_runtime.engine.shared_prefix import cut
from skiff_runtime.kernels.e4m3 import E4M3
from skiff_runtime.kernels.shared_prefixes import packed_size, unpack
from skiff_runtime.kernels.triton.attention.decode_launch import Decode, find_row_counts_by_variant
from skiff_runtime.kernels.triton.attention.prefill_attention import Prefill
from skiff_runtime.kernels.triton.runtime.cached_launch import LayerKV

pytestmark = pytest.mark.usefixtures("poisoned")


class Paged:
    """Contexts of ``lengths`` tokens in a pool whose other places are NaN."""

    def __init__(
        self, lengths: list[int], *, page_size: int, kv: int, dim: int, dtype: torch.dtype, seed: int
    ) -> None:
        rng = np.random.default_rng(seed)
        self.page_size, self.kv, self.dim = page_size, kv, dim
        held = [-(-length // page_size) for length in lengths]
        ids = iter(rng.permutation(sum(held) + 3).tolist())
        self.slots = torch.from_numpy(rng.permutation(len(lengths) + 2)[: len(lengths)].astype(np.int32))
        self.pages = torch.zeros(len(lengths) + 2, max(held) + 1, dtype=torch.int32)
        shape = ((sum(held) + 3) * page_size, kv, dim)
        sides = tuple(poison(torch.empty(shape, dtype=dtype)) for _ in range(2))
        generator = torch.Generator().manual_seed(seed)
        self.contexts = []
        for slot, length, count in zip(self.slots.tolist(), lengths, held, strict=True):
            self.pages[slot, :count] = torch.tensor([next(ids) for _ in range(count)])
            positions = torch.arange(length)
            places = self.pages[slot][positions // page_size].long() * page_size + positions % page_size
            context = torch.randn(2, length, kv, dim, generator=generator).to(dtype)
            sides[0][places], sides[1][places] = context
            self.contexts.append(context.double())
        self.pool = sides[0].to(DEVICE), sides[1].to(DEVICE)

    def share(self, groups: np.ndarray, tokens: np.ndarray) -> None:
        """Let the rows of a group hold the pages of its first row, for their first ``tokens``: whole pages."""
        for row, (group, count) in enumerate(zip(groups, tokens, strict=True)):
            leader = int(np.argmax(groups == group))
            pages = int(count) // self.page_size
            source, target = int(self.slots[leader]), int(self.slots[row])
            self.pages[target, :pages] = self.pages[source, :pages]
            self.contexts[row][:, :count] = self.contexts[leader][:, :count]

    def expected(self, q: torch.Tensor, starts: list[int]) -> torch.Tensor:
        """Of each row's last tokens, row by row; q [T, heads, d]."""
        counts = [context.shape[1] - start for context, start in zip(self.contexts, starts, strict=True)]
        rows = zip(torch.split(q, counts), self.contexts, strict=True)
        return torch.cat([causal_attention(row, *context) for row, context in rows])


def decode(queries: torch.Tensor, pool: LayerKV, *tables: Any, **options: Any) -> torch.Tensor:
    """One layer of a step, its launch made for it alone."""
    answer = poison(torch.empty_like(queries))
    Decode(queries, pool, *tables, **options)(queries, pool, answer)
    return answer


HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
"""The interpreter multiplies no matrices of bfloat16."""
CASES = [
    (1, 2, 1, 16, torch.float32),
    (16, 1, 5, 24, HALF),
    (3, 2, 2, 64, HALF),
    (2, 1, 9, 32, HALF),
    (4, 1, 17, 16, HALF),
]
"""Page size, KV heads, query heads of each, dimensions, type. With up to eight query heads tokens come first in products."""
CACHED = [
    *((*case, case[-1]) for case in CASES),
    (1, 2, 1, 16, torch.float32, E4M3),
    (5, 2, 3, 40, HALF, E4M3),
    (4, 1, 2, 16, HALF, E4M3),
    (2, 1, 17, 32, HALF, E4M3),
]
"""The same, with the type of the cache."""


@pytest.mark.parametrize("page_size, kv, group, dim, dtype, cached", CACHED, ids=str)
@pytest.mark.parametrize("longest", [1, 1 << 12], ids=["whole", "split"])
def test_decode(
    page_size: int, kv: int, group: int, dim: int, dtype: torch.dtype, cached: torch.dtype, longest: int
) -> None:
    lengths = [1, 130, 64, 17]
    made = Paged(lengths, page_size=page_size, kv=kv, dim=dim, dtype=cached, seed=dim)
    q = torch.randn(len(lengths), kv * group, dim, generator=torch.Generator().manual_seed(1)).to(dtype)
    answer = decode(
        q.to(DEVICE),
        made.pool,
        made.slots.to(DEVICE),
        made.pages.to(DEVICE),
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        page_size,
        longest=longest,
    )
    assert error(answer, made.expected(q, [length - 1 for length in lengths])) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("page_size, kv, group, dim, dtype, cached", CACHED, ids=str)
@pytest.mark.parametrize("longest", [1, 1 << 12], ids=["whole", "split"])
def test_decode_with_common_prefixes(
    page_size: int, kv: int, group: int, dim: int, dtype: torch.dtype, cached: torch.dtype, longest: int
) -> None:
    """Two groups, one of more rows than read together, beside a row on its own and a long one that is cut, too."""
    lengths = [99, 170, 40, 97, 145, 98, 200, 330]
    groups = np.array([1, 0, 2, 1, 0, 1, 0, 7], np.int32)
    tokens = np.array([96, 144, 0, 96, 144, 96, 144, 320], np.int32) // page_size * page_size
    made = Paged(lengths, page_size=page_size, kv=kv, dim=dim, dtype=cached, seed=dim)
    made.share(groups, tokens)
    q = torch.randn(len(lengths), kv * group, dim, generator=torch.Generator().manual_seed(1)).to(dtype)
    packed = cut(groups, tokens, members=2, rows=len(lengths))
    answer = decode(
        q.to(DEVICE),
        made.pool,
        made.slots.to(DEVICE),
        made.pages.to(DEVICE),
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        page_size,
        longest=longest,
        shared=unpack(torch.from_numpy(packed).to(DEVICE), len(lengths)),
    )
    assert error(answer, made.expected(q, [length - 1 for length in lengths])) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("page_size, kv, group, dim, dtype", CASES, ids=str)
def test_layers_of_one_step(page_size: int, kv: int, group: int, dim: int, dtype: torch.dtype) -> None:
    """A launch is repeated with other queries and another layer, even one that begins at an odd place."""
    lengths = [30, 7, 300]
    made = Paged(lengths, page_size=page_size, kv=kv, dim=dim, dtype=dtype, seed=dim + 2)
    tables = made.slots.to(DEVICE), made.pages.to(DEVICE)
    contexts = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    generator = torch.Generator().manual_seed(1)
    first = torch.randn(len(lengths), kv * group, dim, generator=generator).to(dtype)
    launch = Decode(first.to(DEVICE), made.pool, *tables, contexts, page_size, longest=1 << 12)
    doubled = 2 * made.pool[0], 2 * made.pool[1]
    for q, pool, factor in (
        (first, made.pool, 1),
        (first.flip(0), made.pool, 1),
        (first / 2, doubled, 2),
        (first / 2, (displaced(doubled[0]), displaced(doubled[1])), 2),
        (first.flip(0), made.pool, 1),
    ):
        answer = poison(torch.empty(q.shape, dtype=dtype)).to(DEVICE)
        launch(q.to(DEVICE), pool, answer)
        expected = factor * made.expected(factor * q, [length - 1 for length in lengths])
        assert error(answer / factor, expected / factor) < 2 * TOLERANCE[dtype]


def displaced(side: torch.Tensor) -> torch.Tensor:
    """A copy that begins one number behind a place where a run of 16 bytes may begin."""
    room = torch.empty(side.numel() + 1, dtype=side.dtype, device=side.device)
    return room[1:].view(side.shape).copy_(side)


@pytest.mark.parametrize("page_size, kv, group, dim, dtype", CASES, ids=str)
def test_prefill(page_size: int, kv: int, group: int, dim: int, dtype: torch.dtype) -> None:
    """Chunks with and without something before them, after two tokens that are not theirs."""
    lengths, starts = [40, 139, 30], [0, 9, 29]
    made = Paged(lengths, page_size=page_size, kv=kv, dim=dim, dtype=dtype, seed=dim + 1)
    counts = np.subtract(lengths, starts)
    q = torch.randn(counts.sum(), kv * group, dim, generator=torch.Generator().manual_seed(1)).to(dtype)
    rows = np.stack((made.slots.numpy(), starts, counts, np.cumsum(counts) - counts + 2)).astype(np.int32)
    queries = q.to(DEVICE)
    answer = poison(torch.empty_like(queries))
    tables = torch.from_numpy(rows).to(DEVICE), made.pages.to(DEVICE)
    Prefill(queries, made.pool, *tables, page_size, longest=int(counts.max()), skipped=2)(
        queries, made.pool, answer
    )
    assert error(answer, made.expected(q, starts)) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 8, 10, 32])
def test_every_kernel_of_mixed_steps_is_rehearsed(kv_heads: int, shares: bool) -> None:
    """Any number of decode rows launches kernels that one of the distinct numbers launches, too."""

    def compiled_for(rows: int) -> tuple[Any, ...]:
        queries = torch.empty(rows, 2 * kv_heads, 64, dtype=torch.bfloat16)
        pool = tuple(torch.empty(0, kv_heads, 64, dtype=torch.bfloat16) for _ in range(2))
        ints = torch.empty(rows, 4, dtype=torch.int32)
        shared = unpack(torch.empty(packed_size(rows), dtype=torch.int32), rows) if shares else None
        tables = ints[:, 0], ints, ints[:, 0]
        launch = Decode(queries, (pool[0], pool[1]), *tables, 16, longest=4096, shared=shared)
        made = [launch._read_rows, *([launch._merge] if launch._places > 1 else [])]
        made += [launch._read_prefixes] if shares else []
        return tuple(each._options[name] for each in made for name in sorted(each._options))

    distinct = find_row_counts_by_variant(
        256, kv_heads, 4096, torch.bfloat16, torch.bfloat16, 64, shared=shares
    )
    assert {compiled_for(rows) for rows in range(1 + shares, 257)} == {
        compiled_for(rows) for rows in distinct
    }
    assert len({compiled_for(rows) for rows in distinct}) == len(distinct) < 12


def test_results_do_not_depend_on_the_page_size() -> None:
    """To the last bit."""
    answers = []
    for page_size in (1, 16, 64):
        made = Paged([150, 70], page_size=page_size, kv=1, dim=16, dtype=torch.float32, seed=3)
        q = torch.randn(2, 2, 16, generator=torch.Generator().manual_seed(1))
        tables = made.slots.to(DEVICE), made.pages.to(DEVICE)
        contexts = torch.tensor([150, 70], dtype=torch.int32, device=DEVICE)
        answers.append(decode(q.to(DEVICE), made.pool, *tables, contexts, page_size, longest=600).cpu())
    assert torch.equal(answers[0], answers[1]) and torch.equal(answers[0], answers[2])
