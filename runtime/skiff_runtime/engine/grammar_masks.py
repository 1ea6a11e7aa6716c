"""Holds answers to their grammars while the steps go on.

The mask of a row's next token is made on a thread as soon as the token before it is known, beside the model's
forward pass, and waited for right before the next one is sampled. A grammar is read on another thread, before its
request is let in. xgrammar is imported there, too, on a GPU while the model loads: many small services never need it.
"""

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from threading import Lock
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from numpy.typing import NDArray

from skiff_runtime import log
from skiff_runtime.engine.input_batch import SampledRows
from skiff_runtime.engine.staging_buffers import upload
from skiff_runtime.engine.step_output import Arrival
from skiff_runtime.errors import ModelError
from skiff_runtime.kernels.token_bitmask import apply_token_bitmask, bitmask_words
from skiff_runtime.messages import CompiledGrammar
from skiff_runtime.models.config import ModelConfig
from skiff_runtime.step import Int32, SlotOpened

if TYPE_CHECKING:
    from skiff_runtime.grammar.matcher import BatchGrammarMatcher, GrammarMatcher, LoadedGrammarCache

MAX_FILLING_THREADS: Final = 8
Rows = NDArray[np.int64]
_UNREADABLE = (ModelError, RuntimeError, ValueError)


class GrammarMaskManager:
    """The followers of all slots, and the threads on which they work.

    ``open`` belongs to the thread that launches steps, ``restrict`` and ``follow`` to the one that runs them. A slot
    opens only when every step with a row of it has run, but the mask behind its last token may still be in the making.
    """

    def __init__(self, slots: int, model: ModelConfig, *, threads: int) -> None:
        """``threads`` fill the masks of many rows together."""
        self._model = model
        self._threads = threads
        self._guided = np.zeros(slots, dtype=np.bool_)
        self._masks = np.zeros((slots, bitmask_words(model.vocab_size)), dtype=np.int32)
        self._followers: list[GrammarMatcher | None] = [None] * slots
        """None: its grammar cannot be followed."""
        self._pending: list[Future[None] | None] = [None] * slots
        """What still works on the slot's mask."""
        self._batch: BatchGrammarMatcher | None = None
        self._shelf: LoadedGrammarCache | None = None
        self._opening = Lock()
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="grammar-reader")
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="grammar-loader")
        self._filler = ThreadPoolExecutor(1, thread_name_prefix="grammar-filler")

    def prepare(self) -> None:
        """Begin to get ready for grammars, so that the first one holds up nobody."""
        self._loader.submit(self._open_shelf)

    def read(self, grammar: CompiledGrammar) -> "Future[None] | None":
        """Begin to read a grammar, so that slots open without waiting for it; None where it is at hand.

        One that cannot be read is told when its slot opens.
        """
        if self._shelf is not None and grammar.key in self._shelf:
            return None
        return self._reader.submit(self._read, grammar)

    def open(self, opened: Sequence[SlotOpened]) -> None:
        """Begin to follow the grammars of newly taken slots; what was not read before is read now."""
        for each in opened:
            self._guided[each.slot] = each.grammar is not None
            if each.grammar is not None:
                before = self._pending[each.slot]
                self._pending[each.slot] = self._loader.submit(self._load, each, before)

    def asking(self, slots: Int32) -> NDArray[np.bool_]:
        """Of which of these slots the answer must match a grammar."""
        return self._guided[slots]

    def restrict(self, logits: torch.Tensor, rows: SampledRows) -> Rows:
        """Mask logits float32 [S, vocab] in place, where answers must match a grammar.

        Returns the rows whose answers cannot go on: no token of theirs would be right.
        """
        guided = np.flatnonzero(self._guided[rows.host_slots])
        if len(guided) == 0:
            return guided
        followers = [self._follower(int(slot)) for slot in rows.host_slots[guided]]
        bound = guided[[each is not None and each.bound for each in followers]]
        if len(bound):
            masks = upload(self._masks[rows.host_slots[bound]], logits.device)
            apply_token_bitmask(logits, upload(bound, logits.device), masks)
        return guided[[each is None or each.stuck for each in followers]]

    def follow(self, rows: SampledRows, arrival: Arrival) -> None:
        """Make the next masks as soon as this step's tokens have arrived."""
        followed = []
        for row in np.flatnonzero(self._guided[rows.host_slots]).tolist():
            follower = self._followers[rows.host_slots[row]]
            if follower is not None and follower.bound:
                followed.append((row, follower))
        if followed:
            future = self._filler.submit(self._follow, rows.host_slots, followed, arrival)
            for row, _ in followed:
                self._pending[rows.host_slots[row]] = future

    def close(self) -> None:
        """Wait for what is in the making, and end the threads."""
        self._reader.shutdown(wait=True, cancel_futures=True)
        self._loader.shutdown(wait=True, cancel_futures=True)
        self._filler.shutdown(wait=True, cancel_futures=True)

    def _follower(self, slot: int) -> "GrammarMatcher | None":
        """The slot's, once its mask is made."""
        pending = self._pending[slot]
        if pending is not None:
            pending.result()
        return self._followers[slot]

    def _read(self, grammar: CompiledGrammar) -> None:
        with suppress(*_UNREADABLE):
            self._open_shelf().get(grammar)

    def _load(self, opened: SlotOpened, before: "Future[None] | None") -> None:
        """Make a slot's follower, and its first mask."""
        from skiff_runtime.grammar.matcher import GrammarMatcher

        if before is not None:
            before.result()
        assert opened.grammar is not None
        self._followers[opened.slot] = None
        try:
            grammar = self._open_shelf().get(opened.grammar)
        except _UNREADABLE as error:
            log.error("grammar_load_failed", error=str(error))
            return
        follower = GrammarMatcher(grammar, self._masks[opened.slot])
        follower.follow(opened.tokens[opened.prompt_tokens :].tolist())
        self._followers[opened.slot] = follower

    def _follow(
        self, host_slots: Int32, followed: Sequence[tuple[int, "GrammarMatcher"]], arrival: Arrival
    ) -> None:
        """Go on with the tokens that arrived, and fill the next masks; the filler thread's part of ``follow``."""
        from skiff_runtime.grammar.matcher import BatchGrammarMatcher

        if self._batch is None:
            self._batch = BatchGrammarMatcher(self._masks, self._threads)
        tokens = arrival.tokens()
        going = [
            (row, follower) for row, follower in followed if tokens[row] >= 0
        ]  # the others' requests end
        self._batch.follow(
            [follower for _, follower in going],
            [int(host_slots[row]) for row, _ in going],
            [int(tokens[row]) for row, _ in going],
        )

    def _open_shelf(self) -> "LoadedGrammarCache":
        from skiff_runtime.grammar.matcher import LoadedGrammarCache
        from skiff_runtime.grammar.tokenizer_info import read_tokenizer_info

        with self._opening:
            if self._shelf is None:
                self._shelf = LoadedGrammarCache(read_tokenizer_info(self._model))
            return self._shelf


def mask_fill_threads(device: torch.device, ranks: int) -> int:
    """Return how many threads should fill the masks of one of ``ranks`` on this machine.

    Half of a rank's share of the cores: the others launch kernels and serve HTTP. On a CPU the model's own threads use
    every core.
    """
    if device.type != "cuda":
        return 1
    return max(1, min(MAX_FILLING_THREADS, len(os.sched_getaffinity(0)) // (2 * ranks)))
