"""The lockstep checksum, by which ranks notice that they planned different steps."""

from collections.abc import Sequence
from typing import Final
from zlib import crc32

import numpy as np

from skiff_runtime.kvcache.prefix_cache import Int32
from skiff_runtime.step import StepPlan

_CAPTURE: Final = b"capture"


class LockstepChecksum:
    """A running CRC-32 over every plan and every token so far: once two ranks differ, they differ for good."""

    def __init__(self) -> None:
        self.value = 0

    def add_plan(self, step: StepPlan) -> None:
        """Add a planned step."""
        for column in (step.slots, step.starts, step.lengths, step.page_slots, step.page_columns):
            self._add(column)
        self._add(step.page_ids)
        for opened in step.opened:
            self._add(opened.tokens)
        for load in step.lora_loads:
            self._add(np.array([load.lora_slot, load.adapter_id], np.int32))
        if step.captures_graph:
            self.value = crc32(_CAPTURE, self.value)

    def add_tokens(self, tokens: Int32) -> None:
        """Add the sampled tokens of a retired step."""
        self._add(tokens)

    def add_refused_adapters(self, adapter_ids: Sequence[int]) -> None:
        """Add the adapters that this rank could not read at the start."""
        self._add(np.array(adapter_ids, np.int32))

    def add_flushed_pages(self, pages: Int32) -> None:
        """Add the pages that a flush of the prefix cache freed."""
        self._add(pages)

    def _add(self, column: Int32) -> None:
        self.value = crc32(column.tobytes(), self.value)
