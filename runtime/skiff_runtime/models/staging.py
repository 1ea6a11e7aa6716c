"""The way of a checkpoint's rows into a rank's weights: read by several threads, placed where they belong at once."""

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Final

import torch

from skiff_runtime.kernels.e4m3 import E4M3, quantize_rows
from skiff_runtime.layers.sharding import Piece
from skiff_runtime.models.checkpoint import Source

MAX_THREADS: Final = 16
"""Enough for a page cache to fill the bus to a GPU."""
STAGE_BYTES: Final = 32 << 20
"""Read at a time by one thread."""
_TYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": E4M3,
}


@dataclass(frozen=True, slots=True)
class Job:
    """Rows ``first`` to ``last`` of a piece's target."""

    piece: Piece
    source: Source
    first: int
    last: int

    @property
    def nbytes(self) -> int:
        """Share of the piece's bytes."""
        return self.piece.nbytes * (self.last - self.first) // max(1, self.piece.target.shape[0])


def bring(
    sources: Iterable[tuple[Piece, Source]],
    device: torch.device,
    told: Callable[[int], None],
    *,
    stage_bytes: int = STAGE_BYTES,
) -> None:
    """Fill every piece from its source; ``told`` is called, in this thread, with the bytes that each job brought."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # what was done to the weights before, on another stream
    jobs = [job for piece, source in sources for job in _jobs(piece, source, stage_bytes)]
    threads = min(MAX_THREADS, len(os.sched_getaffinity(0)), max(1, len(jobs)))
    stages = threading.local()

    def work(job: Job) -> int:
        if not hasattr(stages, "own"):
            stages.own = _Stage(device)
        stage: _Stage = stages.own
        stage.run(job)
        return job.nbytes

    with ThreadPoolExecutor(threads, thread_name_prefix="weights") as pool:
        futures = [pool.submit(work, job) for job in jobs]
        try:
            for future in as_completed(futures):
                told(future.result())
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _jobs(piece: Piece, source: Source, stage_bytes: int) -> Iterator[Job]:
    rows = piece.target.shape[0]
    step = max(1, stage_bytes // max(1, source.tensor.row_bytes))
    for first in range(0, rows, step):
        yield Job(piece, source, first, min(first + step, rows))


class _Stage:
    """One thread's buffer, pinned where the device is a GPU, and its stream there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @torch.inference_mode()
    def run(self, job: Job) -> None:
        if self._stream is None:
            self._place(job)
            return
        with torch.cuda.stream(self._stream):
            self._place(job)
        self._stream.synchronize()  # the buffer is free again

    def _place(self, job: Job) -> None:
        piece, tensor = job.piece, job.source.tensor
        target = piece.target[job.first : job.last]
        first = job.first + (piece.start if piece.dim == 0 else 0)
        count = job.last - job.first
        offset = tensor.offset + first * tensor.row_bytes
        whole = piece.dim == 0 or piece.target.shape == piece.shape
        if whole and self._stream is None and _TYPES[tensor.kind] == target.dtype and target.is_contiguous():
            job.source.file.read(target.view(-1).view(torch.uint8).numpy().data, offset)
        else:
            values = self._read(job.source, first, count).view(count, *tensor.shape[1:])
            if piece.dim == 1:
                values = values[:, piece.start : piece.stop]
            _store(job, target, self._on_device(values, target))
        if job.source.scales is not None:
            assert piece.scales is not None
            scales = self._read(job.source.scales, first, count).view(count, 1)
            piece.scales[job.first : job.last].copy_(scales.to(self._device))

    def _read(self, source: Source, first: int, count: int) -> torch.Tensor:
        """Rows of a tensor, flat, in the file's type; in the buffer, until the next read."""
        needed = count * source.tensor.row_bytes
        if len(self._buffer) < needed:
            size = max(needed, STAGE_BYTES)
            self._buffer = torch.empty(size, dtype=torch.uint8, pin_memory=self._stream is not None)
        elif self._stream is not None:
            self._stream.synchronize()
        taken = self._buffer[:needed]
        source.file.read(taken.numpy().data, source.tensor.offset + first * source.tensor.row_bytes)
        return taken.view(_TYPES[source.tensor.kind])

    def _on_device(self, values: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """On the device before any conversion: a GPU converts faster, and needs no copy where there is none."""
        if self._stream is None or (values.dtype == target.dtype and values.is_contiguous()):
            return values
        return values.contiguous().to(self._device, non_blocking=True)


def _store(job: Job, target: torch.Tensor, values: torch.Tensor) -> None:
    """Convert what must be; ``values`` are the target's, in the checkpoint's type."""
    scales = job.piece.scales
    if scales is None or values.dtype == E4M3:
        target.copy_(values, non_blocking=True)
        return
    rounded, found = quantize_rows(values)
    target.copy_(rounded)
    scales[job.first : job.last].copy_(found)
