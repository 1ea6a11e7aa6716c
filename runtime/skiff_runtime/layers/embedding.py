"""Token embedding and output head, cut by vocabulary over the ranks."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from skiff_runtime.layers.sharding import LayerContext, Piece


class VocabParallelEmbedding:
    """Token ids [T] -> vectors [T, hidden]. Each rank holds an equal share of rows, the last ones padded."""

    def __init__(self, vocab_size: int, hidden_size: int, placement: LayerContext) -> None:
        group = placement.group
        self._group = group
        self._shape = (vocab_size, hidden_size)
        share = -(-vocab_size // group.size)
        self._start = min(group.rank * share, vocab_size)
        self._stop = min(self._start + share, vocab_size)
        self.weight = placement.empty(share, hidden_size)
        self.weight[self._stop - self._start :] = 0

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self._group.size == 1:
            return F.embedding(token_ids, self.weight)
        elsewhere = (token_ids < self._start) | (token_ids >= self._stop)
        local = (token_ids - self._start).masked_fill(elsewhere, 0)
        vectors = F.embedding(local, self.weight).masked_fill(elsewhere[:, None], 0)
        return self._group.all_reduce(vectors)

    def pieces(self, name: str) -> Iterator[Piece]:
        """Part of the checkpoint tensor ``name`` that fills this layer."""
        rows = self.weight[: self._stop - self._start]
        yield Piece(name, self._shape, 0, self._start, self._stop, rows)


class OutputHead:
    """Vectors [S, hidden] -> logits [S, vocab_size], gathered, so the same bits on every rank; float32 on a CPU."""

    def __init__(self, embedding: VocabParallelEmbedding, vocab_size: int, placement: LayerContext) -> None:
        self._embedding = embedding
        self._vocab_size = vocab_size
        self._group = placement.group

    def room(self, rows: int) -> torch.Tensor:
        """Where the logits of so many vectors can be put: [rows, at least vocab_size], in the model's type."""
        share = self._embedding.weight
        return share.new_empty((rows, len(share) * self._group.size))

    def __call__(self, hidden: torch.Tensor, room: torch.Tensor | None = None) -> torch.Tensor:
        """With ``room`` for S vectors, the logits are put there, also on a CPU in the model's type."""
        weight = self._embedding.weight
        if room is not None and self._group.size == 1:
            logits = torch.mm(hidden, weight.T, out=room)
        else:
            logits = F.linear(hidden, weight)
        if room is None and logits.device.type == "cpu":
            logits = logits.float()
        return self._group.all_gather(logits, room)[:, : self._vocab_size]
