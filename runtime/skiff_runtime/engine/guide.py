"""Holds answers to their grammars while the steps go on.

The mask of a row's next token is made on a thread as soon as the token before it is known, beside the model's
forward pass, and waited for right before the next one is sampled. A grammar is read on another thread, before its
request is let in. xgrammar is imported there, too, on a GPU while the model loads: many small services never need it.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from skiff_runtime import log
from skiff_runtime.engine.arrival import Arrival
from skiff_runtime.engine.batch import SampledRows
from skiff_runtime.engine.staging import upload
from skiff_runtime.errors import ModelError
from skiff_runtime.kernels.bitmask import keep_admitted, mask_words
from skiff_runtime.messages import CompiledGrammar
from skiff_runtime.models.config import ModelConfig
from skiff_runtime.step import Int32, SlotOpened

if TYPE_CHECKING:
    from skiff_runtime.grammar.matcher import Follower, GrammarShelf

Rows = NDArray[np.int64]
_UNREADABLE = (ModelError, RuntimeError, ValueError)


class GrammarGuide:
    """The followers of all slots, and the threads on which they work.

    ``open`` belongs to the thread that launches steps, ``restrict`` and ``follow`` to the one that runs them. A slot
    opens only when every step with a row of it has run, but the mask behind its last token may still be in the making.
    """

    def __init__(self, slots: int, model: ModelConfig) -> None:
        self._model = model
        self._guided = np.zeros(slots, dtype=np.bool_)
        self._masks = np.zeros((slots, mask_words(model.vocab_size)), dtype=np.int32)
        self._followers: list[Follower | None] = [None] * slots
        """None: its grammar cannot be followed."""
        self._pending: list[Future[None] | None] = [None] * slots
        """What still works on the slot's mask."""
        self._shelf: GrammarShelf | None = None
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
            keep_admitted(logits, upload(bound, logits.device), masks)
        return guided[[each is None or each.stuck for each in followers]]

    def follow(self, rows: SampledRows, arrival: Arrival) -> None:
        """Make the next masks as soon as this step's tokens have arrived."""
        followed = []
        for row in np.flatnonzero(self._guided[rows.host_slots]).tolist():
            follower = self._followers[rows.host_slots[row]]
            if follower is not None and follower.bound:
                followed.append((row, follower))
        if followed:
            future = self._filler.submit(_follow, followed, arrival)
            for row, _ in followed:
                self._pending[rows.host_slots[row]] = future

    def close(self) -> None:
        """Wait for what is in the making, and end the threads."""
        self._reader.shutdown(wait=True, cancel_futures=True)
        self._loader.shutdown(wait=True, cancel_futures=True)
        self._filler.shutdown(wait=True, cancel_futures=True)

    def _follower(self, slot: int) -> "Follower | None":
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
        from skiff_runtime.grammar.matcher import Follower

        if before is not None:
            before.result()
        assert opened.grammar is not None
        self._followers[opened.slot] = None
        try:
            grammar = self._open_shelf().get(opened.grammar)
        except _UNREADABLE as error:
            log.error("grammar_unreadable", error=str(error))
            return
        follower = Follower(grammar, self._masks[opened.slot])
        follower.follow(opened.tokens[opened.prompt_tokens :].tolist())
        self._followers[opened.slot] = follower

    def _open_shelf(self) -> "GrammarShelf":
        from skiff_runtime.grammar.matcher import GrammarShelf
        from skiff_runtime.grammar.vocabulary import read_vocabulary

        with self._opening:
            if self._shelf is None:
                self._shelf = GrammarShelf(read_vocabulary(self._model))
            return self._shelf


def _follow(followed: Sequence[tuple[int, "Follower"]], arrival: Arrival) -> None:
    tokens = arrival.tokens()
    for row, follower in followed:
        if tokens[row] >= 0:  # else its request ends
            follower.follow((int(tokens[row]),))
