"""The seam between the scheduler and the transport: where its messages come from and go to."""

from abc import ABC, abstractmethod

from skiff_runtime.messages import AdapterRead, Shutdown, TokenBatch, ToScheduler

SchedulerInput = ToScheduler | AdapterRead | Shutdown


class Channel(ABC):
    """One scheduler's end of the transport."""

    @abstractmethod
    def receive(self, *, wait: bool, checksum: int) -> list[SchedulerInput]:
        """Return what arrived for this turn of the loop, in the same order on every rank.

        ``wait``: there is nothing to compute, so block until something arrives or a short time has passed.
        ``checksum``: this scheduler's lockstep checksum; a channel that joins several ranks compares theirs.
        """

    @abstractmethod
    def send(self, batch: TokenBatch) -> None:
        """Send the results of a step to the detokenizer."""
