"""Memory of CUDA graphs and of whole steps, as the memory profile measures it and its cache keeps it; imports no torch."""

from typing import Final

from msgspec import Struct

FRAGMENTATION: Final = 0.1
"""Share of the activations that fragmentation of the allocator may cost."""


class GraphMemory(Struct, frozen=True):
    """Bytes of one kind of graphs: of the tensors of its runner, of the largest graph, and of each of ``count`` - 1 others."""

    runner: int = 0
    largest: int = 0
    further: int = 0
    count: int = 0

    @property
    def total(self) -> int:
        """Bytes of all of them."""
        return self.runner + self.largest + self.further * max(0, self.count - 1)


NO_GRAPH_MEMORY: Final = GraphMemory()


class MemoryProfile(Struct, frozen=True):
    """Bytes of a rank besides weights and KV cache: of the largest step, of all graphs, and of sampling."""

    activations: int
    decode_graphs: GraphMemory
    prefill_graphs: GraphMemory
    sampling: int

    @property
    def step_bytes(self) -> int:
        """Bytes that a step takes at most."""
        return int(self.activations * (1 + FRAGMENTATION)) + self.sampling

    @property
    def reserved_bytes(self) -> int:
        """Bytes that the KV cache must leave free."""
        return self.step_bytes + self.decode_graphs.total + self.prefill_graphs.total
