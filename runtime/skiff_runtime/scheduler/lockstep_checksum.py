"""A running checksum of all that a scheduler planned and retired, by which ranks find that they differ."""

from zlib import crc32

from skiff_runtime.kvcache.prefix_cache import Int32
from skiff_runtime.step import StepPlan


class Digest:
    """``value`` depends on every plan and every token so far, so a difference never heals."""

    def __init__(self) -> None:
        self.value = 0

    def planned(self, step: StepPlan) -> None:
        """Take in a planned step."""
        for column in (step.slots, step.starts, step.lengths, step.page_slots, step.page_columns):
            self._add(column)
        self._add(step.page_ids)
        for opened in step.opened:
            self._add(opened.tokens)

    def retired(self, tokens: Int32) -> None:
        """Take in the tokens of a step."""
        self._add(tokens)

    def flushed(self, pages: Int32) -> None:
        """Take in the pages that the cache gave up."""
        self._add(pages)

    def _add(self, column: Int32) -> None:
        self.value = crc32(column.tobytes(), self.value)
