"""Functions that the processes of an interpreted all-reduce test run; importable by those of ``rank_processes``."""

import hashlib
import itertools
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from all_reduce_messages import make_message, same_bits, sum_messages
from kernel_device import DEVICE
from simulated_peers import SimulatedPeer, map_files

from skiff_runtime.distributed.copy_exchange import CopyExchange
from skiff_runtime.distributed.tensor_parallel import TensorParallelGroup
from skiff_runtime.kernels.fp8_tensors import QuantizedActivations
from skiff_runtime.kernels.triton.all_reduce import gemv_all_reduce, peer_memory, push_norm
from skiff_runtime.kernels.triton.all_reduce.barrier import barrier
from skiff_runtime.kernels.triton.all_reduce.gemv_all_reduce import gemv_all_reduce_add_rms_norm
from skiff_runtime.kernels.triton.all_reduce.low_latency import (
    all_reduce_add_rms_norm,
    all_reduce_add_rms_norm_quantize,
    low_latency_all_reduce,
)
from skiff_runtime.kernels.triton.all_reduce.peer_memory import (
    CHANNELS,
    FLAGS_BYTES,
    LINE_BYTES,
    SLOT_BYTES,
    SLOT_LINES,
    allocation_bytes,
    wait_state,
)
from skiff_runtime.kernels.triton.all_reduce.push import push_all_reduce
from skiff_runtime.kernels.triton.all_reduce.push_norm import (
    push_all_reduce_add_rms_norm,
    push_all_reduce_add_rms_norm_quantize,
)
from skiff_runtime.kernels.triton.fp8.quantize import add_rms_norm_quantize
from skiff_runtime.kernels.triton.linear.gemv import gemv
from skiff_runtime.kernels.triton.norm_act.rms_norm import add_rms_norm
from skiff_runtime.kernels.tuning import GemvTile, overridden, tuning_for

EPS = 1e-5
POLLS = 1_000_000
PREFETCH_BYTES = push_norm.PREFETCH_BYTES
POLL_SECONDS = 0.0005
KINDS = ("words", "one-shot", "two-shot", "fused one-shot")
EXCHANGES = 40
EXCHANGED_WIDTH = 8
SIZES = (8, 24, 4096, 8200)
"""Elements: a few lines, or several programs, the last of which has fewer lines."""


def _count_polls(polls: tl.tensor, _ptx: bool) -> tl.tensor:
    """Do what ``read_clock`` does in the interpreter, and leave the core to the ranks that are waited for."""
    time.sleep(POLL_SECONDS)
    return polls


if DEVICE.type == "cpu":
    peer_memory.read_clock = vars(gemv_all_reduce)["read_clock"] = _count_polls


def join(group: TensorParallelGroup, directory: str, polls: int = POLLS) -> SimulatedPeer:
    """Map the ranks' memory, when all ranks are there."""
    peer = map_files(Path(directory), group.tp_rank, group.tp_size, polls=polls)
    group.all_reduce_min(0)
    return peer


def age(peer: SimulatedPeer, rank: int, epoch: int) -> None:
    """Let the next call have this epoch; no LL word of the rank's memory has the mark 0 then, as in a new one."""
    peer.memory.epochs.fill_(epoch - 1)
    words = 2 * peer.memory.ranks * CHANNELS * SLOT_LINES * 2 * LINE_BYTES
    start = allocation_bytes(peer.memory.ranks) - 2 * CHANNELS * SLOT_BYTES - words
    peer.buffers[rank][start : start + words].fill_(0x55)


def sum_by(kind: str, x: torch.Tensor, peer: SimulatedPeer) -> torch.Tensor:
    """Return the sum of a message [N] over the ranks by one of ``KINDS``, or "gemv"; ``x`` may be overwritten.

    "barrier" returns ``x`` itself.

    The fused kernel sums rows of 40 elements where it can, of 8 otherwise. A residual of -0.0 changes no bit of a sum.
    The message of "gemv" is the product of a matrix of one column with 1, which loses the sign of -0.0.
    """
    if kind == "gemv":
        residual = torch.full((1, len(x)), -0.0, dtype=x.dtype)
        _, total = gemv_all_reduce_add_rms_norm(
            torch.ones((1, 1), dtype=x.dtype), x[:, None], residual, residual[0], EPS, peer.memory
        )
        return total[0]
    if kind == "fused one-shot":
        rows = x.view(-1, 40 if len(x) % 40 == 0 else 8)
        residual = torch.full_like(rows, -0.0)
        _, total = push_all_reduce_add_rms_norm(rows, residual, residual[0], EPS, peer.memory)
        return total.view(-1)
    if kind == "words":
        low_latency_all_reduce(x, peer.memory)
    elif kind == "barrier":
        barrier(peer.memory)
    else:
        push_all_reduce(x, peer.memory, two_shot=kind == "two-shot")
    return x


def sum_in_every_way(
    group: TensorParallelGroup, directory: str, dtype_name: str, first_epoch: int
) -> dict[str, Any]:
    """Sum messages of all ``SIZES`` by each kernel, in random order, with nothing between them that orders the ranks.

    Returns the rounds whose sum is not that of ``sum_messages``, bit for bit, and a digest of all sums.
    """
    peer = map_files(Path(directory), group.tp_rank, group.tp_size, polls=POLLS)
    if first_epoch > 1:
        age(peer, group.tp_rank, first_epoch)
    group.all_reduce_min(0)
    dtype = getattr(torch, dtype_name)
    digest, wrong, rounds = hashlib.sha256(), [], list(itertools.product(KINDS, SIZES))
    random.Random(0).shuffle(rounds)
    for number, (kind, size) in enumerate(rounds):
        shape = (size,)
        x = sum_by(kind, make_message(group.tp_rank, number, shape, dtype), peer)
        if not same_bits(x, sum_messages(group.tp_size, number, shape, dtype)):
            wrong.append((number, kind, shape))
        digest.update(x.view(torch.uint8).numpy().tobytes())
    return {
        "wrong": wrong,
        "digest": digest.hexdigest(),
        "epochs": (peer.memory.epochs - first_epoch + 1).tolist(),
        "failed": peer.has_failed,
    }


def refresh(group: TensorParallelGroup, directory: str, kind: str, epoch: int) -> list[list[bool]]:
    """Sum a short message in call ``epoch``; return which sources' LL words of the first two channels all have its mark.

    The first source is the other rank, the second this one.
    """
    peer = map_files(Path(directory), group.tp_rank, group.tp_size, polls=POLLS)
    age(peer, group.tp_rank, epoch)
    group.all_reduce_min(0)
    sum_by(kind, make_message(group.tp_rank, 0, (8,), torch.float32), peer)
    group.all_reduce_min(0)
    channel_bytes = SLOT_LINES * 2 * LINE_BYTES
    marked: list[list[bool]] = []
    for channel in range(2):
        marked.append([])
        for source in (1 - group.tp_rank, group.tp_rank):
            slot = (epoch % 2) * group.tp_size + source
            start = FLAGS_BYTES + (slot * CHANNELS + channel) * channel_bytes
            words = peer.buffers[group.tp_rank][start : start + channel_bytes].view(torch.int64)
            marked[-1].append(bool((words >> 32 == epoch).all()))
    return marked


def multiply_and_fuse(
    group: TensorParallelGroup, directory: str, dtype_name: str, first_epoch: int
) -> dict[str, Any]:
    """Compare products that are fused with sum and norm with those that are not, which are sums of LL words between them.

    Returns, for each tile, which of norm and total have equal bits.
    """
    peer = map_files(Path(directory), group.tp_rank, group.tp_size, polls=POLLS)
    age(peer, group.tp_rank, first_epoch)
    group.all_reduce_min(0)
    dtype, tuning = getattr(torch, dtype_name), tuning_for(DEVICE)
    few = replace(tuning, gemv_all_reduce=replace(tuning.gemv_all_reduce, prefetch_programs=1))
    results: dict[str, Any] = {"bits": [], "digest": hashlib.sha256()}
    tiles = (GemvTile(32), GemvTile(64, pair=True), None)
    for number, (tile, outputs) in enumerate(itertools.product(tiles, (6, 40))):
        x = make_message(group.tp_rank, number, (1, 96), dtype)
        matrix = make_message(group.tp_rank, 10 + number, (outputs, 96), dtype) / 8
        residual = make_message(20, number, (1, outputs), dtype)
        weight = make_message(21, number, (outputs,), dtype)
        next_matrix = torch.empty((128, 1024), dtype=dtype)
        with overridden(few):
            found = gemv_all_reduce_add_rms_norm(
                x, matrix, residual, weight, EPS, peer.memory, next_matrix=next_matrix, tile=tile
            )
        summed = torch.zeros(-(-outputs // 8) * 8, dtype=dtype)  # whole lines
        summed[:outputs] = gemv(x, matrix, tile=tile or tuning.gemv_all_reduce.tile)[0]
        low_latency_all_reduce(summed, peer.memory)
        expected = add_rms_norm(summed[None, :outputs], residual, weight, EPS)
        results["bits"].append([*map(same_bits, found, expected)])
        for each in found:
            results["digest"].update(each.view(torch.uint8).numpy().tobytes())
    results["digest"] = results["digest"].hexdigest()
    results["calls"] = (peer.memory.epochs - first_epoch + 1)[:2].tolist()
    results["failed"] = peer.has_failed
    return results


def fuse(group: TensorParallelGroup, directory: str, dtype_name: str) -> dict[str, Any]:
    """Compare the fused kernels with an all-reduce followed by the kernels that are not fused.

    The rows of one shape are more than the programs; which rows a program takes does not depend on the type. They are
    long because the first call of a channel stores all of its words, in tiles as long as a row.
    """
    peer = join(group, directory)
    dtype = getattr(torch, dtype_name)
    shapes = [(1, 64), (3, 96), (2, 1536)] + [(CHANNELS + 1, 1024)] * (dtype == torch.float32)
    results: dict[str, Any] = {}
    for number, (rows, width) in enumerate(shapes):
        part = make_message(group.tp_rank, number, (rows, width), dtype)
        residual = make_message(10, number, (rows, width), dtype)
        weight = make_message(11, number, (width,), dtype)
        summed = part.clone()
        low_latency_all_reduce(summed.view(-1), peer.memory)
        expected = add_rms_norm(summed, residual, weight, EPS)
        found = all_reduce_add_rms_norm(part, residual, weight, EPS, peer.memory)
        expected_quantized = add_rms_norm_quantize(summed, residual, weight, EPS, 3.0)
        found_quantized = all_reduce_add_rms_norm_quantize(part, residual, weight, EPS, peer.memory, 3.0)
        results[f"{rows} x {width}"] = [
            *map(same_bits, found, expected),
            *map(same_bits, parts(*found_quantized), parts(*expected_quantized)),
        ]
        for prefetch_bytes in (0, PREFETCH_BYTES):
            push_norm.PREFETCH_BYTES = prefetch_bytes  # type: ignore[misc]
            found = push_all_reduce_add_rms_norm(part, residual, weight, EPS, peer.memory)
            found_quantized = push_all_reduce_add_rms_norm_quantize(
                part, residual, weight, EPS, peer.memory, 3.0
            )
            results[f"one-shot, {rows} x {width}, {prefetch_bytes}"] = [
                *map(same_bits, found, expected),
                *map(same_bits, parts(*found_quantized), parts(*expected_quantized)),
            ]
    return results


def parts(quantized: QuantizedActivations, total: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors of a quantized result."""
    return quantized.values, quantized.scales, total


def exchange(group: TensorParallelGroup, directory: str, first_epoch: int) -> dict[str, Any]:
    """Exchange messages of random sizes in chunks, among sums; a rank may be late before it reads what it has received.

    Returns the numbers of the messages that were not the other rank's, and the calls of the first channels.
    """
    peer = map_files(Path(directory), group.tp_rank, group.tp_size, polls=POLLS)
    age(peer, group.tp_rank, first_epoch)
    capacity = 64 * EXCHANGED_WIDTH * 4
    own, other = (
        torch.from_file(f"{directory}/received{rank}", shared=True, size=capacity, dtype=torch.uint8)
        for rank in (group.tp_rank, 1 - group.tp_rank)
    )
    exchanges = CopyExchange(peer.memory, own, other)
    assert exchanges.capacity == capacity
    group.all_reduce_min(0)
    same, late = random.Random(0), random.Random(group.tp_rank)
    wrong: list[Any] = []
    for number in range(EXCHANGES):
        dtype = same.choice([torch.float32, torch.bfloat16])
        shape = same.randint(1, 64), EXCHANGED_WIDTH
        computed, message = make_message(group.tp_rank, number, shape, dtype), torch.empty(shape, dtype=dtype)
        pending, start = exchanges.start(message), 0
        while start < shape[0]:
            rows = slice(start, start + same.randint(1, 64))
            message[rows] = computed[rows]
            pending.send(rows)
            start = rows.stop
        received = pending.finish()
        time.sleep(late.choice([0, 0, 0.01]))
        if not same_bits(received, make_message(1 - group.tp_rank, number, shape, dtype)):
            wrong.append(number)
        if same.random() < 0.5:
            sum_by("words", torch.zeros(8), peer)
    return {
        "wrong": wrong,
        "calls": (peer.memory.epochs - first_epoch + 1)[:2].tolist(),
        "failed": peer.has_failed,
    }


def wait_in_vain(group: TensorParallelGroup, directory: str, kind: str) -> dict[str, Any]:
    """Let rank 0 sum without the others; they come when it has given up."""
    peer = join(group, directory, polls=3)
    x = make_message(group.tp_rank, 0, (8 if kind == "gemv" else 4096,), torch.float32)
    if group.tp_rank == 0:
        for _ in range(2):
            sum_by(kind, x, peer)
    group.all_reduce_min(0)
    return {"failed": peer.has_failed, "collective": int(peer.status.item())}


def come_late(group: TensorParallelGroup, directory: str, kind: str) -> list[dict[str, bool]]:
    """Let rank 0 run three calls, the first of which times out; then let rank 1 run them.

    The messages take one program each, or a row: the interpreter runs programs one after the other, so those behind one
    that has timed out would store nothing.

    Returns for each call of this rank: its sum is right, and a wait has timed out by its end.
    """
    peer = join(group, directory, polls=3)
    if group.tp_rank == 1:
        group.all_reduce_min(0)
    outcomes = []
    for number in range(3):
        size = 8 if kind in ("fused one-shot", "gemv") else 1024
        x = sum_by(kind, make_message(group.tp_rank, number, (size,), torch.float32), peer)
        right = torch.equal(x, sum_messages(group.tp_size, number, (size,), torch.float32))
        outcomes.append({"right": right, "failed": peer.has_failed})
    if group.tp_rank == 0:
        group.all_reduce_min(0)
    return outcomes


@triton.jit  # type: ignore[untyped-decorator]
def wait_state_kernel(stale: tl.tensor, late: tl.tensor, state: tl.tensor, count: tl.constexpr) -> None:
    """Store the state of a wait for ``count`` elements, each of which has a clock of its own: int32 [count] both."""
    element = tl.arange(0, count)[:, None]
    tl.store(state, wait_state(tl.load(stale + element) != 0, tl.load(late + element)))
