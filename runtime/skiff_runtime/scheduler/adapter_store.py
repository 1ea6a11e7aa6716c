"""The seam between the scheduler and the engine's host copies of LoRA adapters."""

from typing import Protocol


class AdapterStore(Protocol):
    """The adapters of one rank in host memory, from which LoRA slots are filled. The scheduler decides what it holds."""

    def begin_read(self, adapter_id: int, path: str) -> None:
        """Start to read an adapter, and return at once. Its end reaches all schedulers as ``AdapterRead``."""
        ...

    def drop(self, adapter_id: int) -> None:
        """Free an adapter that was read. No launched step still loads it into a slot."""
        ...
