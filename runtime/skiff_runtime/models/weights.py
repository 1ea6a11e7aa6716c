"""Fills a rank's model: from its checkpoint, or with seeded random numbers."""

import zlib
from collections.abc import Callable, Iterable

import torch

from skiff_runtime.layers.placement import Piece
from skiff_runtime.models.checkpoint import Checkpoint
from skiff_runtime.models.decoder import DecoderModel

Progress = Callable[[float], None]


def weight_bytes(model: DecoderModel) -> int:
    """Bytes of all weights of the rank's model; it may be on the meta device."""
    return sum(piece.target.nbytes for piece in model.pieces())


@torch.inference_mode()
def load_weights(model: DecoderModel, load_format: str, progress: Progress) -> None:
    """Fill ``model``; ``progress`` is told the share that is done, 0 to 1, at most a hundred times.

    Raises ``ModelError`` for what is missing, misshapen or unreadable, before anything is
    read wherever the files' headers tell.
    """
    if load_format == "dummy":
        _fill(model.pieces(), weight_bytes(model), _randomize, progress)
        return
    with Checkpoint(model.config.path) as checkpoint:
        checkpoint.check(model.pieces())
        _fill(model.pieces(), weight_bytes(model), checkpoint.read, progress)


def _fill(pieces: Iterable[Piece], total: int, fill: Callable[[Piece], None], progress: Progress) -> None:
    done, told = 0, 0
    for piece in pieces:
        fill(piece)
        done += piece.target.nbytes
        percent = done * 100 // max(total, 1)
        if percent > told:
            told = percent
            progress(percent / 100)


def _randomize(piece: Piece) -> None:
    """Norms one, the rest uniform with variance 1/fan-in, seeded by name and part: copies on ranks agree."""
    if len(piece.shape) == 1 and piece.name.endswith("norm.weight"):
        piece.target.fill_(1.0)
        return
    generator = torch.Generator(device=piece.target.device)
    generator.manual_seed(zlib.crc32(f"{piece.name}:{piece.start}".encode()))
    bound = (3.0 / piece.shape[-1]) ** 0.5
    piece.target.uniform_(-bound, bound, generator=generator)
