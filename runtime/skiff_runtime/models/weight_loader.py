"""Weight loading: fills a rank's model from its checkpoint, or with seeded random numbers.

Several threads read rows of the checkpoint's tensors, each straight to where they belong. On a GPU a thread reads into
a pinned buffer and copies from it on a stream of its own, so that reading and copying overlap.
"""

import os
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Final

import torch

from skiff_runtime import log
from skiff_runtime.gguf.header import is_gguf
from skiff_runtime.kernels.fp8_tensors import E4M3, FP8_MAX, cast_to_fp8, quantize_rows
from skiff_runtime.layers.sharding import TensorConverter, WeightShard
from skiff_runtime.models.checkpoint import Checkpoint, TensorSource
from skiff_runtime.models.decoder import DecoderModel
from skiff_runtime.models.gguf_checkpoint import GgufCheckpoint, GgufSource

MAX_THREADS: Final = 16
"""Enough for the page cache to fill the bus to a GPU."""
MIN_THREADS: Final = 8
"""Also with fewer CPUs: a disk is fast only if it has several reads to do, and a thread that waits for it takes no CPU."""
BUFFER_BYTES: Final = 32 << 20
"""Bytes that one thread reads at a time."""
BATCH_BYTES: Final = 16 << 20
"""Bytes of small tensors that one thread reads one after another, before it waits for their copies to the device."""
MIB: Final = 1 << 20
_ALIGNMENT: Final = 512
"""Of each tensor in the buffer, in bytes: copies of aligned memory are faster, and views of wider types need it."""
_DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": E4M3,
    "I32": torch.int32,
    "I64": torch.int64,
}

ProgressCallback = Callable[[float], None]


@torch.inference_mode()
def load_weights(model: DecoderModel, load_format: str, on_progress: ProgressCallback) -> None:
    """Fill ``model``; report the finished share, 0 to 1, at most a hundred times.

    Raises ``ModelError`` for tensors that are missing, misshapen or unreadable: before any tensor is read, wherever
    the files' headers show it.
    """
    started = time.perf_counter()
    total = model.weight_bytes()
    progress = _Progress(total, on_progress)
    if load_format == "dummy":
        for shard in model.weight_shards():
            _randomize(shard, model.context.dtype)
            progress.add(shard.nbytes)
    else:
        with _open_checkpoint(model) as checkpoint:
            sources = checkpoint.locate(model.weight_shards())
            for precedes in (True, False):
                wave = [(shard, source) for shard, source in sources if _precedes(shard) is precedes]
                load_shards(wave, model.context.device, progress.add)
    progress.add(total)
    if model.context.device.type == "cuda":
        torch.cuda.synchronize(model.context.device)
    log.event(
        "weights_loaded", mib=total // MIB, seconds=f"{time.perf_counter() - started:.2f}", format=load_format
    )


def _open_checkpoint(model: DecoderModel) -> Checkpoint | GgufCheckpoint:
    config = model.config
    if is_gguf(config.path):
        return GgufCheckpoint(config.path, head_dim=config.head_dim)
    return Checkpoint(config.path, quantized=config.weight_format is not None)


def _precedes(shard: WeightShard) -> bool:
    return shard.converter is not None and shard.converter.precedes


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Rows ``first`` to ``last`` of a shard's target, which one thread loads at a time.

    Where a converter fills the target, they are rows of the shard's source instead.
    """

    shard: WeightShard
    source: TensorSource | GgufSource
    first: int
    last: int

    @property
    def nbytes(self) -> int:
        """The job's part of the shard's bytes."""
        return self.shard.nbytes * (self.last - self.first) // max(1, _count_rows(self.shard))

    @property
    def source_bytes(self) -> int:
        """Bytes that the job reads, scales aside."""
        return self.source.tensor.row_bytes * (self.last - self.first)


def load_shards(
    sources: Iterable[tuple[WeightShard, TensorSource | GgufSource]],
    device: torch.device,
    on_loaded: Callable[[int], None],
    *,
    buffer_bytes: int = BUFFER_BYTES,
) -> None:
    """Fill every shard from its source; report each job's bytes to ``on_loaded``, on the calling thread."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # weights were initialized on another stream than the threads' own
    jobs = (job for shard, source in sources for job in _split_into_jobs(shard, source, buffer_bytes))
    batches = list(_batch_jobs(jobs, min(buffer_bytes, BATCH_BYTES)))
    threads = min(MAX_THREADS, max(MIN_THREADS, len(os.sched_getaffinity(0))), max(1, len(batches)))
    local = threading.local()

    def run(batch: list[LoadJob]) -> int:
        if not hasattr(local, "loader"):
            local.loader = _ThreadLoader(device)
        loader: _ThreadLoader = local.loader
        loader.run(batch)
        return sum(job.nbytes for job in batch)

    with ThreadPoolExecutor(threads, thread_name_prefix="weights") as pool:
        futures = [pool.submit(run, batch) for batch in batches]
        try:
            for future in as_completed(futures):
                on_loaded(future.result())
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _split_into_jobs(
    shard: WeightShard, source: TensorSource | GgufSource, buffer_bytes: int
) -> Iterator[LoadJob]:
    rows = _count_rows(shard)
    if isinstance(source, GgufSource):
        step = source.rows_at_a_time
    else:
        step = max(1, buffer_bytes // max(1, source.tensor.row_bytes))
    if shard.converter is not None:
        multiple = shard.converter.rows_multiple or max(1, rows)
        step = max(multiple, step // multiple * multiple)
    for first in range(0, rows, step):
        yield LoadJob(shard, source, first, min(first + step, rows))


def _count_rows(shard: WeightShard) -> int:
    """Return the number of rows that jobs divide: of the target, or of the source where a converter reads it."""
    if shard.converter is None:
        return shard.target.shape[0]
    if shard.dim == 0:
        return shard.stop - shard.start
    return shard.shape[0]


def _batch_jobs(jobs: Iterable[LoadJob], batch_bytes: int) -> Iterator[list[LoadJob]]:
    """Group consecutive jobs that together read at most ``batch_bytes``; a larger one is a batch of its own.

    A mixture of experts has tens of thousands of tensors, and handing each to a thread would take as long as to read it.
    """
    batch: list[LoadJob] = []
    left = batch_bytes
    for job in jobs:
        if batch and job.source_bytes > left:
            yield batch
            batch, left = [], batch_bytes
        batch.append(job)
        left -= job.source_bytes
    if batch:
        yield batch


class _ThreadLoader:
    """One thread's buffer, pinned where the device is a GPU, and its stream there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    @torch.inference_mode()
    def run(self, batch: list[LoadJob]) -> None:
        if self._stream is None:
            for job in batch:
                self._used = 0
                self._load(job)
            return
        with torch.cuda.stream(self._stream):
            for job in batch:
                self._load(job)
            self._wait_for_copies()

    def _load(self, job: LoadJob) -> None:
        shard, source = job.shard, job.source
        if shard.converter is not None:
            assert isinstance(source, TensorSource), (
                "tensors of a GGUF file have no other format than their own"
            )
            self._convert(job, source, shard.converter)
            return
        target = shard.target[job.first : job.last]
        first = job.first + (shard.start if shard.dim == 0 else 0)
        count = job.last - job.first
        if isinstance(source, GgufSource):
            columns = (shard.start, shard.stop) if shard.dim == 1 else None
            _store(job, target, self._to_device(source.read_rows(first, count, columns), target))
            return
        tensor = source.tensor
        offset = tensor.offset + first * tensor.row_bytes
        whole_rows = shard.dim == 0 or shard.target.shape == shard.shape
        if (
            whole_rows
            and self._stream is None
            and _DTYPES[tensor.dtype] == target.dtype
            and target.is_contiguous()
        ):
            source.file.read(target.view(-1).view(torch.uint8).numpy().data, offset)
        else:
            values = self._read(source, first, count).view(count, *tensor.shape[1:])
            if shard.dim == 1:
                values = values[:, shard.start : shard.stop]
            _store(job, target, self._to_device(values, target))
        if source.scales is not None:
            assert shard.scales is not None
            scales = self._read(source.scales, first, count).view(count, 1)
            shard.scales[job.first : job.last].copy_(scales.to(self._device, non_blocking=True))

    def _convert(self, job: LoadJob, source: TensorSource, converter: TensorConverter) -> None:
        """Let the converter store the job's rows, which are moved to the device as they are."""
        shard, tensor = job.shard, source.tensor
        first = job.first + (shard.start if shard.dim == 0 else 0)
        count = job.last - job.first
        values = self._read(source, first, count).view(count, *tensor.shape[1:])
        if shard.dim == 1:
            values = values[:, shard.start : shard.stop]
        if self._stream is not None:
            values = values.contiguous().to(self._device, non_blocking=True)
        converter.store(values, job.first)

    def _read(self, source: TensorSource, first: int, count: int) -> torch.Tensor:
        """Read ``count`` rows of a tensor to the buffer, flat and in the file's dtype."""
        needed = count * source.tensor.row_bytes
        if len(self._buffer) - self._used < needed:
            self._wait_for_copies()
        if len(self._buffer) < needed:
            size = max(needed, BUFFER_BYTES)
            self._buffer = torch.empty(size, dtype=torch.uint8, pin_memory=self._stream is not None)
        taken = self._buffer[self._used : self._used + needed]
        self._used += -(-needed // _ALIGNMENT) * _ALIGNMENT
        source.file.read(taken.numpy().data, source.tensor.offset + first * source.tensor.row_bytes)
        return taken.view(_DTYPES[source.tensor.dtype])

    def _wait_for_copies(self) -> None:
        """Wait until all copies have read the buffer, so that it may be overwritten from its beginning."""
        if self._stream is not None:
            self._stream.synchronize()
        self._used = 0

    def _to_device(self, values: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Copy to the device before a conversion, because a GPU converts faster; without one, return ``values``."""
        if self._stream is None or (values.dtype == target.dtype and values.is_contiguous()):
            return values
        return values.contiguous().to(self._device, non_blocking=True)


def _store(job: LoadJob, target: torch.Tensor, values: torch.Tensor) -> None:
    """Write ``values``, of the checkpoint's dtype, to ``target``, quantized or converted as the target requires."""
    scales = job.shard.scales
    if scales is None or values.dtype == E4M3:
        target.copy_(values, non_blocking=True)
        return
    quantized, row_scales = quantize_rows(values)
    target.copy_(quantized)
    scales[job.first : job.last].copy_(row_scales)


class _Progress:
    """Reports each percent once."""

    def __init__(self, total: int, on_progress: ProgressCallback) -> None:
        self._total = max(total, 1)
        self._on_progress = on_progress
        self._done = self._reported = 0

    def add(self, count: int) -> None:
        self._done = min(self._done + count, self._total)
        percent = self._done * 100 // self._total
        if percent > self._reported:
            self._reported = percent
            self._on_progress(percent / 100)


def _randomize(shard: WeightShard, dtype: torch.dtype) -> None:
    """Fill norms with ones, other weights uniformly with variance 1/fan-in.

    The seed is made of the tensor's name and the shard's start, so that replicas on several ranks agree.
    """
    target = shard.target
    if len(shard.shape) == 1 and shard.name.endswith("norm.weight"):
        target.fill_(1.0)
        return
    generator = torch.Generator(device=target.device)
    generator.manual_seed(zlib.crc32(f"{shard.name}:{shard.start}".encode()))
    if shard.converter is not None:
        shard.converter.randomize(generator)
        return
    if (
        target.dtype == E4M3 and shard.scales is None
    ):  # the converters of its scales give them their magnitude
        drawn = torch.empty(target.shape, device=target.device)
        target.copy_(cast_to_fp8(drawn.uniform_(-FP8_MAX, FP8_MAX, generator=generator)))
        return
    bound = (3.0 / shard.shape[-1]) ** 0.5
    if shard.scales is None:
        target.uniform_(-bound, bound, generator=generator)
        return
    drawn = torch.empty(target.shape, dtype=dtype, device=target.device)
    quantized, scales = quantize_rows(drawn.uniform_(-bound, bound, generator=generator))
    target.copy_(quantized)
    shard.scales.copy_(scales)
