"""Token embedding and output head, sharded over the vocabulary."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from skiff_runtime.layers.sharding import LayerContext, WeightShard


class VocabParallelEmbedding:
    """Token ids [T] -> vectors [T, hidden]. Each rank holds an equal share of the vocabulary, the last ones padded."""

    def __init__(self, vocab_size: int, hidden_size: int, context: LayerContext) -> None:
        group = context.group
        self._group = group
        self._shape = (vocab_size, hidden_size)
        share = -(-vocab_size // group.tp_size)
        self._start = min(group.tp_rank * share, vocab_size)
        self._stop = min(self._start + share, vocab_size)
        self.weight = context.empty(share, hidden_size)
        self.weight[self._stop - self._start :] = 0

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self._group.tp_size == 1:
            return F.embedding(token_ids, self.weight)
        elsewhere = (token_ids < self._start) | (token_ids >= self._stop)
        local = (token_ids - self._start).masked_fill(elsewhere, 0)
        vectors = F.embedding(local, self.weight).masked_fill(elsewhere[:, None], 0)
        return self._group.all_reduce(vectors)

    def weight_shards(self, name: str) -> Iterator[WeightShard]:
        """Yield the shard of the checkpoint tensor ``name`` that fills this layer."""
        rows = self.weight[: self._stop - self._start]
        yield WeightShard(name, self._shape, 0, self._start, self._stop, rows)


class OutputHead:
    """Vectors [S, hidden] -> logits [S, vocab_size], gathered, so bit-identical on every rank; float32 on a CPU."""

    def __init__(self, embedding: VocabParallelEmbedding, vocab_size: int, context: LayerContext) -> None:
        self._embedding = embedding
        self._vocab_size = vocab_size
        self._group = context.group

    def empty_logits(self, rows: int) -> torch.Tensor:
        """Allocate a buffer for the logits of ``rows`` vectors: [rows, at least vocab_size], in the model's dtype."""
        share = self._embedding.weight
        return share.new_empty((rows, len(share) * self._group.tp_size))

    def __call__(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Compute logits; with ``out``, a buffer of S rows, write them there, also on a CPU in the model's dtype."""
        weight = self._embedding.weight
        if out is not None and self._group.tp_size == 1:
            logits = torch.mm(hidden, weight.T, out=out)
        else:
            logits = F.linear(hidden, weight)
        if out is None and logits.device.type == "cpu":
            logits = logits.float()
        return self._group.all_gather(logits, out)[:, : self._vocab_size]
