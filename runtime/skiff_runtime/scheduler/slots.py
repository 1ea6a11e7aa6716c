"""The running requests as columns, one row (slot) each, so that a step touches whole columns.

A request keeps its slot while it runs; engine and scheduler mean the same row of the page
table and of the token table by it. Host tables are reserved whole and, being untouched
memory, cost only what requests use of them.
"""

import heapq
from typing import Final

import numpy as np
from numpy.typing import NDArray

from skiff_runtime.kvcache.prefix_cache import Int32
from skiff_runtime.scheduler.request import QUEUED, Request

Rows = NDArray[np.int64] | NDArray[np.int32]
"""Indices of slots."""


class Slots:
    """Columns over ``count`` slots. "Planned" means: as of the last planned step, retired or not."""

    def __init__(self, *, count: int, max_tokens: int, max_pages: int) -> None:
        self.count: Final = count
        self.tokens: Int32 = np.empty((count, max_tokens), np.int32)
        """Tokens that the host knows: prompt and retired output."""
        self.pages: Int32 = np.empty((count, max_pages), np.int32)
        """The page table."""
        self.uids: NDArray[np.int64] = np.zeros(count, np.int64)
        self.computed: Int32 = np.zeros(count, np.int32)
        """Tokens whose KV is in memory once the planned steps have run."""
        self.prompts: Int32 = np.zeros(count, np.int32)
        """Tokens to compute before the first one can be sampled."""
        self.held: Int32 = np.zeros(count, np.int32)
        """Filled columns of the page-table row."""
        self.known: Int32 = np.zeros(count, np.int32)
        """Filled columns of the token row."""
        self.num_unplanned_outputs: Int32 = np.zeros(count, np.int32)
        """Output tokens allowed and not planned yet."""
        self.unsent: Int32 = np.zeros(count, np.int32)
        """Output tokens allowed and not retired yet."""
        self.num_in_flight_steps: Int32 = np.zeros(count, np.int32)
        """Steps in flight that have a row of this slot."""
        self.alive: NDArray[np.bool_] = np.zeros(count, np.bool_)
        """Occupied by a request that has not ended."""
        self.prefilling: NDArray[np.bool_] = np.zeros(count, np.bool_)
        self.decoding: NDArray[np.bool_] = np.zeros(count, np.bool_)
        """The next step computes the token that the last planned one samples."""
        self.ignores_eos: NDArray[np.bool_] = np.zeros(count, np.bool_)
        self.has_stops: NDArray[np.bool_] = np.zeros(count, np.bool_)
        self._requests: list[Request | None] = [None] * count
        self._free: list[int] = list(range(count))

    @property
    def occupied(self) -> int:
        """Slots in use, those of ended requests that are still in flight included."""
        return self.count - len(self._free)

    @property
    def running(self) -> int:
        """Requests that have a slot and have not ended."""
        return int(np.count_nonzero(self.alive))

    @property
    def full(self) -> bool:
        return not self._free

    def request(self, slot: int) -> Request:
        """Who occupies the slot."""
        request = self._requests[slot]
        assert request is not None, f"slot {slot} is free"
        return request

    def requests(self) -> list[Request]:
        """All occupants, by slot."""
        return [request for request in self._requests if request is not None]

    def holds(self, request: Request) -> bool:
        """Whether the request still occupies a slot."""
        return request.slot != QUEUED and self._requests[request.slot] is request

    def open(self, request: Request, cached: Int32) -> None:
        """Take the lowest free slot for a request whose first pages int32[P] are cached."""
        slot = request.slot = heapq.heappop(self._free)
        length, pages = len(request.tokens), len(cached)
        self._requests[slot] = request
        self.tokens[slot, :length] = request.tokens
        self.pages[slot, :pages] = cached
        self.uids[slot] = request.uid
        self.held[slot] = pages
        self.prompts[slot] = self.known[slot] = length
        self.num_unplanned_outputs[slot] = self.unsent[slot] = request.remaining
        self.num_in_flight_steps[slot] = 0
        self.alive[slot] = self.prefilling[slot] = True
        self.decoding[slot] = False
        self.ignores_eos[slot] = request.sampling.ignore_eos
        self.has_stops[slot] = bool(request.sampling.stop_token_ids)

    def end(self, slot: int) -> None:
        """Its request gets no further row; the slot stays until it is closed."""
        self.alive[slot] = self.prefilling[slot] = self.decoding[slot] = False

    def close(self, request: Request) -> None:
        """Give the slot to others."""
        slot, request.slot = request.slot, QUEUED
        self.end(slot)
        self._requests[slot] = None
        heapq.heappush(self._free, slot)

    def mark_sampling_planned(self, rows: Rows) -> None:
        """A planned step samples a token of each of these rows; the next step computes it.

        A request that thereby reaches ``max_tokens`` gets no further row: its end is known
        before its last token is.
        """
        left = self.num_unplanned_outputs[rows] - 1
        self.num_unplanned_outputs[rows] = left
        self.decoding[rows] = left > 0
