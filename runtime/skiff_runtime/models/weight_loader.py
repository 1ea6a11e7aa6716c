"""Fills a rank's model: from its checkpoint, or with seeded random numbers."""

import time
import zlib
from collections.abc import Callable
from typing import Final

import torch

from skiff_runtime import log
from skiff_runtime.kernels.e4m3 import quantize_rows
from skiff_runtime.layers.sharding import Piece
from skiff_runtime.models.checkpoint import Checkpoint
from skiff_runtime.models.decoder import DecoderModel
from skiff_runtime.models.staging import bring

Progress = Callable[[float], None]
MIB: Final = 1 << 20


def weight_bytes(model: DecoderModel) -> int:
    """Bytes of all weights of the rank's model; it may be on the meta device."""
    return sum(piece.nbytes for piece in model.pieces())


@torch.inference_mode()
def load_weights(model: DecoderModel, load_format: str, progress: Progress) -> None:
    """Fill ``model``; ``progress`` is told the share that is done, 0 to 1, at most a hundred times.

    Raises ``ModelError`` for what is missing, misshapen or unreadable, before anything is
    read wherever the files' headers tell.
    """
    started = time.perf_counter()
    total = weight_bytes(model)
    share = _Share(total, progress)
    if load_format == "dummy":
        for piece in model.pieces():
            _randomize(piece, model.placement.dtype)
            share.add(piece.nbytes)
    else:
        with Checkpoint(model.config.path, quantized=model.config.quantization == "fp8") as checkpoint:
            bring(checkpoint.sources(model.pieces()), model.placement.device, share.add)
    share.add(total)
    if model.placement.device.type == "cuda":
        torch.cuda.synchronize(model.placement.device)
    log.event(
        "weights_loaded", mib=total // MIB, seconds=f"{time.perf_counter() - started:.2f}", format=load_format
    )


class _Share:
    """Tells of each percent once."""

    def __init__(self, total: int, progress: Progress) -> None:
        self._total = max(total, 1)
        self._progress = progress
        self._done = self._told = 0

    def add(self, count: int) -> None:
        self._done = min(self._done + count, self._total)
        percent = self._done * 100 // self._total
        if percent > self._told:
            self._told = percent
            self._progress(percent / 100)


def _randomize(piece: Piece, dtype: torch.dtype) -> None:
    """Norms one, the rest uniform with variance 1/fan-in, seeded by name and part: copies on ranks agree."""
    target = piece.target
    if len(piece.shape) == 1 and piece.name.endswith("norm.weight"):
        target.fill_(1.0)
        return
    generator = torch.Generator(device=target.device)
    generator.manual_seed(zlib.crc32(f"{piece.name}:{piece.start}".encode()))
    bound = (3.0 / piece.shape[-1]) ** 0.5
    if piece.scales is None:
        target.uniform_(-bound, bound, generator=generator)
        return
    drawn = torch.empty(target.shape, dtype=dtype, device=target.device)
    rounded, scales = quantize_rows(drawn.uniform_(-bound, bound, generator=generator))
    target.copy_(rounded)
    piece.scales.copy_(scales)
