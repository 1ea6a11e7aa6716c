"""The running requests as columns, one slot each, so that a step updates whole columns at once.

A request keeps its slot while it runs. Scheduler and engine use the same slot as the row of the page table
and of the token table. The tables are allocated at full size, but untouched memory costs nothing, so they
take only what requests use of them.
"""

import heapq
from typing import Final

import numpy as np
from numpy.typing import NDArray

from skiff_runtime.kvcache.prefix_cache import Int32
from skiff_runtime.scheduler.request import NO_SLOT, Request

SlotIndices = NDArray[np.int64] | NDArray[np.int32]


class Slots:
    """Columns over ``count`` slots. "Planned" means: as of the last planned step, retired or not.

    Other classes read the columns; only the methods of this class write them.
    """

    def __init__(self, *, count: int, max_tokens: int, max_pages: int) -> None:
        self.count: Final = count
        self.tokens: Int32 = np.empty((count, max_tokens), np.int32)
        """Tokens that the host knows: prompt and retired output."""
        self.pages: Int32 = np.empty((count, max_pages), np.int32)
        """The page table."""
        self.uids: NDArray[np.int64] = np.zeros(count, np.int64)
        self.num_computed_tokens: Int32 = np.zeros(count, np.int32)
        """Tokens whose KV is in memory once the planned steps have run."""
        self.num_prefill_tokens: Int32 = np.zeros(count, np.int32)
        """Tokens to compute before the first output token can be sampled."""
        self.num_pages: Int32 = np.zeros(count, np.int32)
        """Filled columns of the page-table row."""
        self.num_tokens: Int32 = np.zeros(count, np.int32)
        """Filled columns of the token row."""
        self.num_unplanned_outputs: Int32 = np.zeros(count, np.int32)
        """Output tokens allowed and not planned yet."""
        self.num_unretired_outputs: Int32 = np.zeros(count, np.int32)
        """Output tokens allowed and not retired yet."""
        self.num_in_flight_steps: Int32 = np.zeros(count, np.int32)
        """Steps in flight that have a row of this slot."""
        self.alive: NDArray[np.bool_] = np.zeros(count, np.bool_)
        """Occupied by a request that has not ended."""
        self.prefilling: NDArray[np.bool_] = np.zeros(count, np.bool_)
        self.decoding: NDArray[np.bool_] = np.zeros(count, np.bool_)
        """The next step computes the token that the last planned step samples."""
        self.ignores_eos: NDArray[np.bool_] = np.zeros(count, np.bool_)
        self.has_stop_tokens: NDArray[np.bool_] = np.zeros(count, np.bool_)
        self._requests: list[Request | None] = [None] * count
        self._free: list[int] = list(range(count))

    @property
    def num_occupied(self) -> int:
        """Slots in use, including those of ended requests that are still in flight."""
        return self.count - len(self._free)

    @property
    def num_running(self) -> int:
        """Requests that have a slot and have not ended."""
        return int(np.count_nonzero(self.alive))

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that the planned steps leave to compute before each running request samples its first token."""
        rows = np.flatnonzero(self.prefilling)
        if not len(rows):
            return 0
        return int((self.num_prefill_tokens[rows] - self.num_computed_tokens[rows]).sum())

    @property
    def is_full(self) -> bool:
        return not self._free

    def request(self, slot: int) -> Request:
        """Return the request that occupies the slot."""
        request = self._requests[slot]
        assert request is not None, f"slot {slot} is free"
        return request

    def requests(self) -> list[Request]:
        """Return the requests of all occupied slots, in the order of slots."""
        return [request for request in self._requests if request is not None]

    def has_request(self, request: Request) -> bool:
        """Return whether the request still occupies a slot."""
        return request.slot != NO_SLOT and self._requests[request.slot] is request

    def open(self, request: Request, cached_pages: Int32, num_computed_tokens: int) -> None:
        """Give the lowest free slot to a request.

        ``cached_pages`` int32[P] are the first pages of its row; they hold the KV of its first
        ``num_computed_tokens`` tokens.
        """
        slot = request.slot = heapq.heappop(self._free)
        length, pages = len(request.tokens), len(cached_pages)
        self._requests[slot] = request
        self.tokens[slot, :length] = request.tokens
        self.pages[slot, :pages] = cached_pages
        self.uids[slot] = request.uid
        self.num_pages[slot] = pages
        self.num_computed_tokens[slot] = num_computed_tokens
        self.num_prefill_tokens[slot] = self.num_tokens[slot] = length
        self.num_unplanned_outputs[slot] = self.num_unretired_outputs[slot] = request.remaining
        self.num_in_flight_steps[slot] = 0
        self.alive[slot] = self.prefilling[slot] = True
        self.decoding[slot] = False
        self.ignores_eos[slot] = request.sampling.ignore_eos
        self.has_stop_tokens[slot] = bool(request.sampling.stop_token_ids)

    def finish(self, slot: int) -> None:
        """Plan no further row for the slot's request. It keeps the slot until ``close``."""
        self.alive[slot] = self.prefilling[slot] = self.decoding[slot] = False

    def close(self, request: Request) -> None:
        """Free the request's slot."""
        slot, request.slot = request.slot, NO_SLOT
        self.finish(slot)
        self._requests[slot] = None
        heapq.heappush(self._free, slot)

    def append_pages(self, slot: int, pages: Int32) -> int:
        """Append pages int32[P] to one row of the page table; return the first column that they fill."""
        first = int(self.num_pages[slot])
        self.pages[slot, first : first + len(pages)] = pages
        self.num_pages[slot] += len(pages)
        return first

    def append_page_each(self, slots: SlotIndices, pages: Int32) -> Int32:
        """Append ``pages[i]`` to the row of ``slots[i]``; return the columns int32[len(slots)] that they fill."""
        columns = self.num_pages[slots]
        self.pages[slots, columns] = pages
        self.num_pages[slots] = columns + 1
        return columns

    def replace_pages(self, slot: int, columns: Int32, pages: Int32) -> Int32:
        """Set ``columns`` of one row of the page table to ``pages``; return the pages that stood there."""
        row = self.pages[slot]
        replaced: Int32 = row[columns]
        row[columns] = pages
        return replaced

    def plan_decode(self, slots: SlotIndices) -> None:
        """Plan one decode row for each of these slots: compute one token, sample the next."""
        self.num_computed_tokens[slots] += 1
        self._plan_sampling(slots)

    def plan_prefill(self, slot: int, length: int) -> bool:
        """Plan a prefill chunk of ``length`` tokens; return whether it samples a token.

        The last chunk does, unless the request has no output: then its vector is computed from the prompt.
        """
        self.num_computed_tokens[slot] += length
        if self.num_computed_tokens[slot] < self.num_prefill_tokens[slot]:
            return False
        self.prefilling[slot] = False
        if not self.num_unplanned_outputs[slot]:
            return False
        self._plan_sampling(np.array([slot]))
        return True

    def _plan_sampling(self, slots: SlotIndices) -> None:
        """Count one planned output token for each slot, which the next step computes.

        A request that reaches ``max_tokens`` thereby gets no further row: its end is known before its last
        token is.
        """
        left = self.num_unplanned_outputs[slots] - 1
        self.num_unplanned_outputs[slots] = left
        self.decoding[slots] = left > 0

    def count_launch(self, slots: SlotIndices) -> None:
        """Count a step that has a row of each of these slots as in flight."""
        self.num_in_flight_steps[slots] += 1

    def count_retirement(self, slots: SlotIndices) -> None:
        """Count such a step as retired."""
        self.num_in_flight_steps[slots] -= 1

    def append_outputs(self, slots: SlotIndices, tokens: Int32) -> Int32:
        """Append one retired token to each slot's row; return the outputs that each may still produce."""
        known = self.num_tokens[slots]
        self.tokens[slots, known] = tokens
        self.num_tokens[slots] = known + 1
        left: Int32 = self.num_unretired_outputs[slots] - 1
        self.num_unretired_outputs[slots] = left
        return left

    def drop_unknown_tokens(self, slots: SlotIndices) -> None:
        """Forget planned tokens that were never sampled: the KV that a step in flight computes of them is void."""
        self.num_computed_tokens[slots] = np.minimum(self.num_computed_tokens[slots], self.num_tokens[slots])
