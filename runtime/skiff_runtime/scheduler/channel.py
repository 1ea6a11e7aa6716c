"""Where a scheduler's messages come from and go to: the seam between planning and transport."""

from abc import ABC, abstractmethod

from skiff_runtime.messages import Shutdown, TokenBatch, ToScheduler

SchedulerInput = ToScheduler | Shutdown


class Channel(ABC):
    """One scheduler's end of the transport."""

    @abstractmethod
    def receive(self, *, wait: bool, checksum: int) -> list[SchedulerInput]:
        """What arrived for this turn, in the order in which every rank gets it.

        ``wait``: there is nothing to compute, so block until something arrives (or a while
        has passed). ``checksum`` tells what this scheduler has planned so far; a channel
        that joins several ranks compares theirs.
        """

    @abstractmethod
    def send(self, batch: TokenBatch) -> None:
        """Hand on what a step brought."""
