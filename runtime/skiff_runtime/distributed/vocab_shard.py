"""The shard of the vocabulary of one rank: the token ids for which it holds embeddings and computes logits."""

from dataclasses import dataclass

import torch

from skiff_runtime.distributed.tensor_parallel import TensorParallelGroup
from skiff_runtime.kernels.constants import vocab_shard_size


@dataclass(frozen=True, slots=True)
class VocabShard:
    """Token ids ``start`` to ``stop`` of ``vocab_size``, in ``size`` columns on each rank.

    All ranks have equally many columns. Where the vocabulary is not divisible into aligned shards, those behind
    ``stop`` on the last ranks are padding: their logits belong to no token, and every consumer must ignore them.
    """

    group: TensorParallelGroup
    vocab_size: int

    @property
    def size(self) -> int:
        """The columns of a rank, padding included."""
        return vocab_shard_size(self.vocab_size, self.group.tp_size)

    @property
    def start(self) -> int:
        """The first token id."""
        return min(self.group.tp_rank * self.size, self.vocab_size)

    @property
    def stop(self) -> int:
        """One more than the last token id; ``start`` on a rank that has padding alone."""
        return min(self.start + self.size, self.vocab_size)

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        """Return whole rows [N, vocab_size] on every rank, from the shards [N, size] of all of them."""
        return self.group.all_gather(logits)[:, : self.vocab_size]

    def exchange_rows(self, logits: torch.Tensor) -> torch.Tensor:
        """Return whole rows ``tp_rank * N`` and on, [N, vocab_size], from the shards [tp_size * N, size] of all ranks.

        Each rank receives 1 / tp_size of what ``gather`` brings it.
        """
        return self.group.all_to_all(logits)[:, : self.vocab_size]
