"""Ranks of an all-reduce as streams of one process on one GPU: thousands of rounds without a barrier between them.

python tests/support/all_reduce_streams.py RANKS ROUNDS SEED prints a JSON object. CUDA_DEVICE_MAX_CONNECTIONS must
exceed the number of ranks, else two streams share a queue and a waiting kernel keeps its peer from starting. Memory,
kernels, modules and graphs are made and used before the first round, while no kernel waits for another rank: where CUDA
loads something, it may wait for all kernels that run.

All programs of all ranks must run at a time, so the messages are small: at most ``LINES`` lines.
"""

import json
import random
import sys
from collections.abc import Callable
from functools import cache
from typing import Any, Final

import torch
from all_reduce_messages import make_message, sum_messages
from simulated_peers import SimulatedPeer, allocate_on_gpu

from skiff_runtime.kernels.triton.all_reduce import push_norm
from skiff_runtime.kernels.triton.all_reduce.gemv_all_reduce import gemv_all_reduce_add_rms_norm
from skiff_runtime.kernels.triton.all_reduce.low_latency import (
    all_reduce_add_rms_norm,
    low_latency_all_reduce,
)
from skiff_runtime.kernels.triton.all_reduce.peer_memory import FAILED
from skiff_runtime.kernels.triton.all_reduce.push import push_all_reduce
from skiff_runtime.kernels.triton.all_reduce.push_norm import push_all_reduce_add_rms_norm
from skiff_runtime.kernels.triton.linear.gemv import gemv
from skiff_runtime.kernels.triton.norm_act.rms_norm import add_rms_norm, row_warps
from skiff_runtime.kernels.tuning import GemvTile

DTYPE: Final = torch.bfloat16
WIDTH: Final = 1024
ROWS: Final = (1, 2, 5, 12)
VARIANTS: Final = 6
"""Different messages of each size."""
TILE: Final = GemvTile(512, pair=True, warps=2)
EPS: Final = 1e-5
TIMEOUT_SECONDS: Final = 20.0
MAX_DELAY_CYCLES: Final = 60_000
GRAPH_CALLS: Final = 5
Call = tuple[str, int, int]
"""Kind, rows, and number of the message."""
KINDS: Final = ("words", "one-shot", "two-shot", "fused", "fused one-shot", "product")
INPUTS: Final = 512
push_norm.PROGRAMS = 4  # type: ignore[misc]  # so that programs of a fused one-shot have several of these few rows


@cache
def make_product(ranks: int, variant: int) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor]:
    """Return (token and matrix of each rank, the sum of their products in rank order, rounded)."""
    operands = [
        (
            make_message(rank, 2000 + variant, (1, INPUTS), DTYPE).cuda(),
            make_message(rank, 3000 + variant, (WIDTH, INPUTS), DTYPE).cuda(),
        )
        for rank in range(ranks)
    ]
    total = torch.zeros((1, WIDTH), dtype=torch.float32, device="cuda")
    for token, matrix in operands:
        total = total + gemv(token, matrix, tile=TILE).float()
    return operands, total.to(DTYPE)


class StreamRank:
    """One rank: its stream, its memory, its copies of the messages, and a count of wrong elements."""

    def __init__(self, rank: int, ranks: int, peer: SimulatedPeer) -> None:
        self._ranks = ranks
        self.peer = peer
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        self._messages: dict[tuple[int, int], torch.Tensor] = {}
        self._expected: dict[tuple[int, int], torch.Tensor] = {}
        self._buffers: dict[int, torch.Tensor] = {}
        self._residual: dict[int, torch.Tensor] = {}
        self._products = [make_product(ranks, variant) for variant in range(VARIANTS)]
        self._rank = rank
        self._weight = make_message(98, 0, (WIDTH,), DTYPE).cuda()
        for rows in ROWS:
            shape = rows, WIDTH
            self._buffers[rows] = torch.empty(shape, dtype=DTYPE, device="cuda")
            self._residual[rows] = make_message(99, rows, shape, DTYPE).cuda()
            for variant in range(VARIANTS):
                number = 100 * rows + variant
                self._messages[rows, variant] = make_message(rank, number, shape, DTYPE).cuda()
                self._expected[rows, variant] = sum_messages(ranks, number, shape, DTYPE).cuda()

    def call(self, kind: str, rows: int, variant: int) -> None:
        """Sum one message on the current stream and count the elements whose bits are wrong."""
        x, memory = self._buffers[rows], self.peer.memory
        x.copy_(self._messages[rows, variant])
        expected = self._expected[rows, variant]
        if kind == "words":
            low_latency_all_reduce(x.view(-1), memory)
        elif kind == "product":
            operands, product = self._products[variant]
            residual = self._residual[rows][:1]
            x, total = gemv_all_reduce_add_rms_norm(
                *operands[self._rank], residual, self._weight, EPS, memory, tile=TILE, warps=row_warps(WIDTH)
            )
            expected, expected_total = add_rms_norm(product, residual, self._weight, EPS)
            self.wrong += (total.view(torch.int16) != expected_total.view(torch.int16)).sum()
        elif kind.startswith("fused"):
            residual = self._residual[rows]
            fused = all_reduce_add_rms_norm if kind == "fused" else push_all_reduce_add_rms_norm
            x, total = fused(x, residual, self._weight, EPS, memory)
            expected, expected_total = add_rms_norm(expected, residual, self._weight, EPS)
            self.wrong += (total.view(torch.int16) != expected_total.view(torch.int16)).sum()
        else:
            push_all_reduce(x.view(-1), memory, two_shot=kind == "two-shot")
        self.wrong += (x.view(torch.int16) != expected.view(torch.int16)).sum()

    def delay(self, cycles: int) -> None:
        """Let the stream do nothing for a while."""
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]

    def capture(self, calls: list[Call]) -> torch.cuda.CUDAGraph:
        """Return a graph of these calls."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            for call in calls:
                self.call(*call)
        return graph


def run(ranks: int, rounds: int, seed: int) -> dict[str, Any]:
    """Run the rounds on all ranks; return how often which kind ran, wrong elements, and ranks that gave up."""
    choices = random.Random(seed)
    peers = allocate_on_gpu(ranks, timeout_seconds=TIMEOUT_SECONDS)
    members = [StreamRank(rank, ranks, peer) for rank, peer in enumerate(peers)]

    def pick() -> Call:
        return choices.choice(KINDS), choices.choice(ROWS), choices.randrange(VARIANTS)

    def on_all(run_one: Callable[[int, StreamRank], None]) -> None:
        for rank in choices.sample(range(ranks), ranks):
            with torch.cuda.stream(members[rank].stream):
                run_one(rank, members[rank])

    def call_on_all(call: Call, late: int = -1, cycles: int = 0) -> None:
        def run_one(rank: int, member: StreamRank) -> None:
            if rank == late:
                member.delay(cycles)
            member.call(*call)

        on_all(run_one)

    for peer in peers:  # as behind a timeout: calls are counted, and nothing is stored or waited for
        peer.memory.control[FAILED].fill_(1)
    for kind in KINDS:
        for rows in ROWS:
            call_on_all((kind, rows, 0), late=0, cycles=1)
            torch.cuda.synchronize()
    recorded = [[pick() for _ in range(GRAPH_CALLS)] for _ in range(4)]
    graphs = [[member.capture(calls) for calls in recorded] for member in members]

    def replay_on_all(index: int) -> None:
        on_all(lambda rank, _: graphs[rank][index].replay())

    for index in range(len(recorded)):
        replay_on_all(index)
    torch.cuda.synchronize()
    for member in members:
        member.peer.memory.control[FAILED].zero_()
        member.peer.status.zero_()
        member.wrong.zero_()
    torch.cuda.synchronize()
    counts = dict.fromkeys((*KINDS, "replays"), 0)
    for _ in range(rounds):
        if choices.random() < 0.3:
            counts["replays"] += 1
            replay_on_all(choices.randrange(len(recorded)))
        else:
            call = pick()
            counts[call[0]] += 1
            late = choices.randrange(ranks) if choices.random() < 0.5 else -1
            call_on_all(call, late, choices.randrange(MAX_DELAY_CYCLES))
    torch.cuda.synchronize()
    return {
        "counts": counts,
        "wrong": [int(member.wrong) for member in members],
        "failed": [peer.has_failed for peer in peers],
        "epochs": [peer.memory.epochs.tolist() for peer in peers],
    }


def wait_in_vain() -> dict[str, Any]:
    """Launch collectives of rank 0 alone, twice."""
    first, _ = allocate_on_gpu(2, timeout_seconds=0.2)
    x = torch.ones((12, WIDTH), dtype=DTYPE, device="cuda")
    reported = []
    launches: tuple[Callable[[], None], ...] = (
        lambda: low_latency_all_reduce(x.view(-1), first.memory),
        lambda: push_all_reduce(x.view(-1), first.memory, two_shot=True),
    )
    for launch in launches:
        launch()
        torch.cuda.synchronize()
        reported.append(int(first.status.item()))
    return {"failed": first.has_failed, "reported": reported}


def come_late() -> dict[str, Any]:
    """Launch three calls of rank 0, the first of which times out, and then those of rank 1.

    Returns by the kind of the kernel, for each call of rank 1: the sum is right, and a wait has timed out by its end.
    """
    shape = ROWS[-1], WIDTH
    found: dict[str, Any] = {}
    for kind in ("words", "one-shot", "two-shot", "fused one-shot", "product"):
        peers = allocate_on_gpu(2, timeout_seconds=0.2)
        for rank, peer in enumerate(peers):
            outcomes: list[list[bool]] = []
            for number in range(3):
                x = make_message(rank, number, shape, DTYPE).cuda()
                expected = sum_messages(2, number, shape, DTYPE)
                if kind == "product":  # of a matrix of one column with 1
                    residual = torch.full((1, WIDTH), -0.0, dtype=DTYPE, device="cuda")
                    one = torch.ones((1, 1), dtype=DTYPE, device="cuda")
                    _, x = gemv_all_reduce_add_rms_norm(
                        one, x[:1].T.contiguous(), residual, residual[0], EPS, peer.memory
                    )
                    expected = expected[:1]
                elif kind == "words":
                    low_latency_all_reduce(x.view(-1), peer.memory)
                elif kind == "fused one-shot":  # a residual of -0.0 changes no bit of a sum
                    residual = torch.full_like(x, -0.0)
                    _, x = push_all_reduce_add_rms_norm(x, residual, residual[0], EPS, peer.memory)
                else:
                    push_all_reduce(x.view(-1), peer.memory, two_shot=kind == "two-shot")
                torch.cuda.synchronize()
                right = torch.equal(x.cpu(), expected)
                outcomes.append([right, peer.has_failed])
            found[kind] = outcomes  # those of rank 1 remain
    return found


if __name__ == "__main__":
    words = sys.argv[1:]
    modes = {"timeout": wait_in_vain, "late": come_late}
    print(json.dumps(modes[words[0]]() if words[0] in modes else run(*map(int, words))))
