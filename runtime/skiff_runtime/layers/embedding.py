"""Token embedding and output head, sharded over the vocabulary."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from skiff_runtime.distributed.vocab_shard import VocabShard
from skiff_runtime.kernels.linear import linear_into
from skiff_runtime.layers.sharding import LayerContext, WeightShard


class VocabParallelEmbedding:
    """Token ids [T] -> vectors [T, hidden]. Each rank holds an equal share of the vocabulary, the last ones padded.

    On a GPU it must stay an operation that is launched without programmatic dependent launch: kernels of the layers read
    the step's tables, which are written ahead of it, before their own wait.
    """

    def __init__(self, vocab_size: int, hidden_size: int, context: LayerContext) -> None:
        self._group = context.group
        self._shape = (vocab_size, hidden_size)
        self.shard = VocabShard(context.group, vocab_size)
        self.weight = context.empty(self.shard.size, hidden_size)
        self.weight[self.shard.stop - self.shard.start :] = 0

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self._group.tp_size == 1:
            return F.embedding(token_ids, self.weight)
        elsewhere = (token_ids < self.shard.start) | (token_ids >= self.shard.stop)
        local = (token_ids - self.shard.start).masked_fill(elsewhere, 0)
        vectors = F.embedding(local, self.weight).masked_fill(elsewhere[:, None], 0)
        return self._group.all_reduce(vectors)

    def weight_shards(self, name: str) -> Iterator[WeightShard]:
        """Yield the shard of the checkpoint tensor ``name`` that fills this layer."""
        start, stop = self.shard.start, self.shard.stop
        yield WeightShard(name, self._shape, 0, start, stop, self.weight[: stop - start])


class OutputHead:
    """Vectors [S, hidden] -> this rank's shard of their logits, [S, shard.size]; float32 on a CPU.

    The columns of ``shard`` that are padding hold no logits. Whole rows are gathered only where something needs them.
    """

    def __init__(self, embedding: VocabParallelEmbedding) -> None:
        self._embedding = embedding
        self.shard = embedding.shard

    def empty_logits(self, rows: int) -> torch.Tensor:
        """Allocate a buffer for the logits of ``rows`` vectors: [rows, shard.size], in the model's dtype."""
        return self._embedding.weight.new_empty((rows, self.shard.size))

    def __call__(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Compute logits; with ``out``, a buffer of S rows, write them there, also on a CPU in the model's dtype."""
        weight = self._embedding.weight
        if out is not None:
            linear_into(hidden, weight, out)
            return out
        logits = F.linear(hidden, weight)
        return logits.float() if logits.device.type == "cpu" else logits
