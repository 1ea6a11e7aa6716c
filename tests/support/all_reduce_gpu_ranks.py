"""Functions that the processes of an all-reduce test on several GPUs run; importable by the processes of ``rank_processes``."""

import hashlib
import math
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal

import torch
from all_reduce_messages import exact_norm, make_message, same_bits, sum_messages

from skiff_runtime.distributed.all_reduce import Algorithm
from skiff_runtime.distributed.tensor_parallel import TensorParallelGroup
from skiff_runtime.errors import CollectiveTimeout
from skiff_runtime.kernels.fp8 import add_rms_norm_quantize
from skiff_runtime.kernels.rms_norm import add_rms_norm
from skiff_runtime.kernels.triton.all_reduce.gemv_all_reduce import gemv_all_reduce_add_rms_norm
from skiff_runtime.kernels.triton.linear.gemv import gemv
from skiff_runtime.kernels.triton.norm_act.rms_norm import row_warps
from skiff_runtime.kernels.tuning import AllReduceLimits, overridden, tuning_for
from skiff_runtime.layers.linear import RowParallelLinear
from skiff_runtime.layers.linear_weight import Fp8LinearWeight
from skiff_runtime.layers.norm import QuantizingRMSNorm
from skiff_runtime.layers.partial_sum import ExchangedSum
from skiff_runtime.layers.sharding import LayerContext

WIDTH: Final = 5120
ROWS: Final = (1, 2, 7, 32, 51, 52, 256, 1600, 2000, 6000, 6600, 7000)
EXCHANGED_ROWS: Final = 6600
"""The largest message that is exchanged."""
LIMITS: Final = AllReduceLimits(
    ranks=8,
    low_latency=512 << 10,
    fused_low_latency=512 << 10,
    one_shot=16 << 20,
    fused_one_shot=8 << 20,
    two_shot=64 << 20,
)
"""Every algorithm sums some of ROWS, which have 10 KB each: both sides of every limit, and more than one slice."""
DTYPE: Final = torch.bfloat16
EPS: Final = 1e-6
REPLAYS: Final = 20
EXCHANGES: Final = 200
NORM_ERROR: Final = 4e-3
"""Relative, of bfloat16 that is rounded twice."""


def sum_fuse_and_replay(group: TensorParallelGroup) -> dict[str, Any]:
    """Compare sums of all sizes, fused norms and graph replays with sums in rank order; return what differs."""
    peers = group._peers
    assert peers is not None, "the GPUs have no peer access"
    peers._limits = (LIMITS,)
    group.allocate_exchange(EXCHANGED_ROWS * WIDTH * DTYPE.itemsize)
    wrong, algorithms, digest = [], [], hashlib.sha256()
    for number, rows in enumerate(ROWS):
        shape = rows, WIDTH
        x = make_message(group.tp_rank, number, shape, DTYPE).cuda()
        expected = sum_messages(group.tp_size, number, shape, DTYPE)
        algorithm = peers.choose(x)
        algorithms.append(algorithm.name)
        found = group.all_reduce(x)
        if algorithm is Algorithm.NCCL:  # sums in an order of its own
            fine = torch.allclose(found.cpu().float(), expected.float(), rtol=2**-7, atol=1e-2)
        else:
            fine = same_bits(found, expected)
            digest.update(found.view(torch.uint8).cpu().numpy().tobytes())
        if not fine:
            wrong.append(f"{rows} rows by {algorithm.name}")
        gathered = group.all_gather(x[:1, :8].contiguous())  # NCCL between our kernels
        if gathered.shape != (1, 8 * group.tp_size):
            wrong.append("all_gather")
    wrong += _compare_fused(group) + _compare_products(group) + _compare_replays(group)
    group.check()
    return {"wrong": wrong, "algorithms": algorithms, "digest": digest.hexdigest()}


def _compare_fused(group: TensorParallelGroup) -> list[str]:
    """Compare fused norms: of a row or less a program by LL words, then by one-shot, up to 8 rows a program."""
    wrong = []
    for rows in (1, 3, 32, 51, 52, 64, 65, 200, 256, 511):
        part = make_message(group.tp_rank, rows, (rows, WIDTH), DTYPE).cuda()
        residual = make_message(50, rows, (rows, WIDTH), DTYPE).cuda()
        weight = make_message(51, rows, (WIDTH,), DTYPE).cuda()
        total = sum_messages(group.tp_size, rows, (rows, WIDTH), DTYPE).cuda()
        assert group._peers is not None and group._peers.can_fuse(part)
        found = group.all_reduce_add_rms_norm(part.clone(), residual, weight, EPS)
        if not all(map(same_bits, found, add_rms_norm(total, residual, weight, EPS))):
            wrong.append(f"fused norm of {rows} rows")
        if not _quantizes_alike(group, part, total, residual, weight):
            wrong.append(f"fused norm and quantization of {rows} rows")
    return wrong


def _quantizes_alike(
    group: TensorParallelGroup,
    part: torch.Tensor,
    total: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
) -> bool:
    """Return whether sum, norm and quantization of the ranks' parts have the bits of those of their ``total``."""
    quantized, summed = group.all_reduce_add_rms_norm_quantize(part, residual, weight, EPS)
    expected, expected_sum = add_rms_norm_quantize(total, residual, weight, EPS, math.inf)
    pairs = [
        (quantized.values, expected.values),
        (quantized.scales, expected.scales),
        (summed, expected_sum),
    ]
    return all(same_bits(*pair) for pair in pairs)


def _compare_products(group: TensorParallelGroup) -> list[str]:
    """Compare products that are fused with sum and norm with those that are not, eagerly and in a graph.

    The products of a layer of Qwen3-32B: in turn, as a step computes them, each prefetching the other's matrix.
    """
    peers = group._peers
    assert peers is not None
    tuning = tuning_for(group.device).gemv_all_reduce
    cases = []
    for number, (inputs, tile) in enumerate(((4096, tuning.tile), (12800, tuning.long_tile))):
        x = make_message(group.tp_rank, 60 + number, (1, inputs), DTYPE).cuda()
        matrix = make_message(group.tp_rank, 70 + number, (WIDTH, inputs), DTYPE).cuda()
        residual = make_message(80, number, (1, WIDTH), DTYPE).cuda()
        weight = make_message(81, number, (WIDTH,), DTYPE).cuda()
        assert group.can_fuse_linear(x, matrix) and not group.can_fuse_linear(x.expand(2, -1), matrix)
        _, total = group.all_reduce_add_rms_norm(gemv(x, matrix, tile=tile), residual, weight, EPS)
        cases.append((x, matrix, residual, weight, total))

    def compute() -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [
            group.linear_all_reduce_add_rms_norm(x, matrix, residual, weight, EPS, cases[1 - index][1])
            for index, (x, matrix, residual, weight, _) in enumerate(cases)
        ]

    wrong = _judge_products("eager", compute(), cases)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(10):
            captured = compute()
    with torch.cuda.stream(stream):
        for number in range(REPLAYS):
            graph.replay()
            wrong += _judge_products(f"replay {number}", captured, cases)
            if number % 3 == 2:
                wrong += _judge_products("eager", compute(), cases)
    x, matrix, residual, weight, _ = cases[0]
    with torch.cuda.stream(
        stream
    ):  # with as many warps, the norm has the bits of the kernel that is not fused
        found = gemv_all_reduce_add_rms_norm(
            x, matrix, residual, weight, EPS, peers._memory, warps=row_warps(WIDTH)
        )
        expected = group.all_reduce_add_rms_norm(gemv(x, matrix, tile=tuning.tile), residual, weight, EPS)
        if not all(map(same_bits, found, expected)):
            wrong.append("product by as many warps")
    return wrong


def _judge_products(
    name: str, found: list[tuple[torch.Tensor, torch.Tensor]], cases: Sequence[tuple[torch.Tensor, ...]]
) -> list[str]:
    wrong = []
    for (normed, total), (*_, weight, expected) in zip(found, cases, strict=True):
        exact = exact_norm(expected, weight, EPS)
        error = (normed.double().cpu() - exact).norm() / exact.norm()
        if not same_bits(total, expected) or not error < NORM_ERROR:
            wrong.append(f"product, {name}: error {error:.1e}")
    return wrong


def _compare_replays(group: TensorParallelGroup) -> list[str]:
    """Replay a graph of our kernels and NCCL's between eager calls."""
    sizes = (1, 32, 256, 2000)
    static = [torch.empty((rows, WIDTH), dtype=DTYPE, device=group.device) for rows in sizes]
    work = [torch.empty_like(each) for each in static]

    def compute() -> None:
        for source, target in zip(static, work, strict=True):
            target.copy_(source)
            group.all_reduce(target)
            group.all_gather(target[:1])

    for each in static:
        each.zero_()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        compute()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        compute()
    wrong = []
    with torch.cuda.stream(stream):
        for number in range(REPLAYS):
            for rows, source in zip(sizes, static, strict=True):
                source.copy_(make_message(group.tp_rank, number, (rows, WIDTH), DTYPE))
            if number % 3 == 2:
                compute()
            else:
                graph.replay()
            stream.synchronize()
            for rows, found in zip(sizes, work, strict=True):
                if not same_bits(found, sum_messages(group.tp_size, number, (rows, WIDTH), DTYPE)):
                    wrong.append(f"replay {number}, {rows} rows")
    return wrong


def exchange(group: TensorParallelGroup) -> dict[str, Any]:
    """Exchange messages and products in every way; return what differs, and a digest of all sums."""
    digest = hashlib.sha256()
    group.allocate_exchange(64 << 20)
    wrong = _exchange_in_a_row(group) + _compare_exchanged_norms(group)
    wrong += _compare_exchanged_products(group, digest)
    wrong += _replay_exchanged_products(group)
    group.check()
    return {"wrong": wrong, "digest": digest.hexdigest()}


def _exchange_in_a_row(group: TensorParallelGroup) -> list[str]:
    """Exchange messages one behind the other, while a rank is late before or behind each; nothing else orders the ranks."""
    peers = group._peers
    assert peers is not None
    same, late = random.Random(0), random.Random(group.tp_rank)
    differing = torch.zeros(EXCHANGES, dtype=torch.int64, device=group.device)
    rows = [same.randint(1300, 6000) for _ in range(EXCHANGES)]

    def make(rank: int, number: int) -> torch.Tensor:
        generator = torch.Generator(group.device).manual_seed(2 * number + rank)
        shape = rows[number], WIDTH
        return torch.randn(shape, generator=generator, device=group.device, dtype=DTYPE)

    for number in range(EXCHANGES):
        message, expected = make(group.tp_rank, number), make(1 - group.tp_rank, number)
        assert peers.choose(message) is Algorithm.COPY_ENGINES
        torch.cuda._sleep(late.choice([0, 0, 3_000_000]))  # type: ignore[no-untyped-call]
        _, received = peers.exchange(message)
        torch.cuda._sleep(late.choice([0, 0, 3_000_000]))  # type: ignore[no-untyped-call]
        differing[number] = (received != expected).sum()
    return [f"message {number}" for number in differing.nonzero().flatten().tolist()]


def _compare_exchanged_norms(group: TensorParallelGroup) -> list[str]:
    """Compare norms of sums whose parts are exchanged whole with those of the sum; the parts lie in wider rows."""
    rows = 2000
    wide = make_message(group.tp_rank, 95, (rows, 2 * WIDTH), DTYPE).cuda()
    residual = make_message(96, 0, (rows, WIDTH), DTYPE).cuda()
    weight = make_message(97, 0, (WIDTH,), DTYPE).cuda()
    total = sum_messages(group.tp_size, 95, (rows, 2 * WIDTH), DTYPE)[:, :WIDTH].cuda()
    part = wide[:, :WIDTH]
    found = group.all_reduce_add_rms_norm(part, residual, weight, EPS)
    wrong = []
    if not all(map(same_bits, found, add_rms_norm(total, residual, weight, EPS))):
        wrong.append("norm of parts that are exchanged whole")
    if not _quantizes_alike(group, part, total, residual, weight):
        wrong.append("norm and quantization of parts that are exchanged whole")
    return wrong


def _compare_exchanged_products(group: TensorParallelGroup, digest: Any) -> list[str]:
    """Compare sums of products in chunks with the whole sums of NCCL and of one rank; whole numbers are not rounded."""
    wrong = []
    inputs, outputs = 32, 4096
    own = slice(group.tp_rank * inputs // 2, (group.tp_rank + 1) * inputs // 2)
    cases = (
        (1000, 4, False, True),
        (1024, 8, True, True),
        (1301, 2, False, True),
        (1301, 1, True, True),
        (2500, 4, True, False),
        (4000, 4, False, False),
    )
    for number, (rows, chunks, bias, whole) in enumerate(cases):
        generator = torch.Generator().manual_seed(number)

        def draw(*shape: int, whole: bool = whole, generator: torch.Generator = generator) -> torch.Tensor:
            values = torch.randn(shape, generator=generator) * 3
            return (values.round() if whole else values).to(group.device)

        x, weight, added = draw(rows, inputs), draw(outputs, inputs), draw(outputs)
        context = LayerContext(torch.float32, group.device, group)
        layer = RowParallelLinear("o_proj", inputs, outputs, bias=bias, context=context)
        assert layer.weight.unquantized is not None
        layer.weight.unquantized.copy_(weight[:, own])
        if layer.bias is not None:
            layer.bias.copy_(added)
        expected = x @ weight.T + (added if bias else 0)
        tuning = tuning_for(group.device)
        divided = replace(tuning.copy_exchange, max_chunks=chunks, min_chunk_rows=256)
        with overridden(replace(tuning, copy_exchange=divided)):
            output = layer(x[:, own])
        if not isinstance(output, ExchangedSum):
            return [f"{rows} rows are not exchanged"]
        found = output.reduce()
        digest.update(found.cpu().numpy().tobytes())
        if not torch.allclose(found, expected, rtol=0, atol=0 if whole else 1e-3):
            wrong.append(f"{rows} rows in {chunks} chunks")
    return wrong


def _replay_exchanged_products(group: TensorParallelGroup) -> list[str]:
    """Replay a graph of products, exchanges and norms, in the model's dtype and in FP8, between eager calls."""
    cases = []
    quantizations: tuple[Literal["none", "fp8"], ...] = ("none", "fp8")
    for quantization in quantizations:
        context = LayerContext(DTYPE, group.device, group, quantization)
        layer = RowParallelLinear("down_proj", 512, WIDTH, bias=False, context=context)
        norm = QuantizingRMSNorm(WIDTH, EPS, context)
        norm.weight.copy_(make_message(90, 0, (WIDTH,), DTYPE))
        values = make_message(group.tp_rank, 91, (WIDTH, 256), DTYPE).cuda() / 16
        if layer.weight.unquantized is not None:
            layer.weight.unquantized.copy_(values)
        else:
            assert isinstance(layer.weight, Fp8LinearWeight)
            matrix = layer.weight.matrix
            matrix.values.copy_(values.to(matrix.values.dtype))
            matrix.scales.fill_(0.5)
        cases.append((layer, norm))
    rows = 2000
    x = torch.zeros((rows, 256), dtype=DTYPE, device=group.device)
    residual = make_message(92, 0, (rows, WIDTH), DTYPE).cuda()

    def compute(exchanged: bool = True) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for layer, norm in cases:
            output = layer(x)
            assert isinstance(output, ExchangedSum) == exchanged
            normed, total = norm.add_and_normalize(output, residual)
            group.all_reduce(total[:1].clone())  # by LL words
            found += [
                total,
                *([normed] if isinstance(normed, torch.Tensor) else [normed.values, normed.scales]),
            ]
        return found

    def expect() -> list[torch.Tensor]:
        """By NCCL, in one chunk each: the library may choose other kernels for chunks, so their products are compared roughly."""
        peers, group._peers = group._peers, None
        found = compute(exchanged=False)
        group._peers = peers
        return found

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        compute()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        captured = compute()
    wrong = []
    late = random.Random(group.tp_rank)
    with torch.cuda.stream(stream):
        for number in range(REPLAYS):
            x.copy_(make_message(group.tp_rank, number, (rows, 256), DTYPE))
            torch.cuda._sleep(late.choice([0, 3_000_000]))  # type: ignore[no-untyped-call]
            graph.replay()
            eager = compute()
            if not all(map(same_bits, captured, eager)):
                wrong.append(f"replay {number} is not the eager call")
            expected = expect()
            wrong += [
                f"call {number}, total {index}"
                for index in (0, 2)
                if not torch.allclose(eager[index].float(), expected[index].float(), rtol=2**-6, atol=2**-4)
            ]
    return wrong


def wait_alone(group: TensorParallelGroup, directory: str) -> dict[str, Any]:
    """Let rank 0 come to a barrier alone, with a short timeout; rank 1 comes when rank 0 has reported it.

    Returns the error, and whether the kernel was still waiting then. Afterwards it has ended.
    """
    peers, reported = group._peers, Path(directory) / "reported"
    assert peers is not None
    group.set_timeout(0.2 if group.tp_rank == 0 else 60.0)
    error, waited = None, None
    deadline = time.monotonic() + 30
    if group.tp_rank == 0:
        peers.barrier()
        while error is None and time.monotonic() < deadline:
            try:
                group.check()
            except CollectiveTimeout as caught:
                error = str(caught)
        waited = not torch.cuda.current_stream().query()
        reported.touch()
    else:
        while not reported.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        peers.barrier()
    torch.cuda.synchronize()
    return {"error": error, "waited": waited}


def leave_alone(group: TensorParallelGroup) -> dict[str, Any]:
    """Let rank 0 sum alone, with a short timeout."""
    group.set_timeout(0.2)
    error = None
    if group.tp_rank == 0:
        group.all_reduce(torch.ones((1, WIDTH), dtype=DTYPE, device=group.device))
        torch.cuda.synchronize()
        try:
            group.check()
        except CollectiveTimeout as caught:
            error = str(caught)
    group.all_reduce_min(0)
    return {"error": error}
