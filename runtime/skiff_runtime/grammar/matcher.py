"""Follows answers token by token under their grammars, by xgrammar: which tokens may come next.

Nothing here knows of steps or devices; ``engine.guide`` does, and calls this on threads of its own.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from threading import Lock
from typing import Final

import xgrammar

from skiff_runtime import log
from skiff_runtime.messages import CompiledGrammar
from skiff_runtime.step import Int32

MAX_GRAMMARS: Final = 256
MAX_GRAMMAR_BYTES: Final = 512 << 20
MIN_BATCH: Final = 4
"""Masks that are filled together; for fewer, waking the threads takes longer than the work."""


class LoadedGrammarCache:
    """Grammars ready for use, the least recently used dropped first beyond a count and a size; for any thread.

    While one is read, others can be got.
    """

    def __init__(
        self,
        vocabulary: xgrammar.TokenizerInfo,
        *,
        max_grammars: int = MAX_GRAMMARS,
        max_bytes: int = MAX_GRAMMAR_BYTES,
    ) -> None:
        self._vocabulary = vocabulary
        self._max_grammars = max_grammars
        self._max_bytes = max_bytes
        self._bytes = 0
        self._lock = Lock()
        self._grammars: OrderedDict[bytes, xgrammar.CompiledGrammar] = OrderedDict()

    def __len__(self) -> int:
        return len(self._grammars)

    def __contains__(self, key: bytes) -> bool:
        return key in self._grammars

    def get(self, grammar: CompiledGrammar) -> xgrammar.CompiledGrammar:
        """The grammar, read from its serialized form unless it is at hand.

        Raises ``RuntimeError`` where the data was not compiled for this vocabulary by this version of xgrammar.
        """
        with self._lock:
            found = self._grammars.get(grammar.key)
            if found is not None:
                self._grammars.move_to_end(grammar.key)
                return found
        read = xgrammar.CompiledGrammar.deserialize_json(grammar.data.decode(), self._vocabulary)
        with self._lock:
            return self._put(grammar.key, read)

    def _put(self, key: bytes, grammar: xgrammar.CompiledGrammar) -> xgrammar.CompiledGrammar:
        """``grammar``, or the same one if another thread was first."""
        found = self._grammars.setdefault(key, grammar)
        if found is grammar:
            self._bytes += grammar.memory_size_bytes
        while len(self) > 1 and (len(self) > self._max_grammars or self._bytes > self._max_bytes):
            _, dropped = self._grammars.popitem(last=False)
            self._bytes -= dropped.memory_size_bytes
        return found


class GrammarMatcher:
    """One answer under one grammar.

    ``bound``: the mask says which tokens may come next. ``stuck``: none may, or one came that may not have.
    Neither: the grammar has ended with its answer, and what comes behind is free.
    """

    def __init__(self, grammar: xgrammar.CompiledGrammar, mask: Int32) -> None:
        """``mask`` int32[words] is filled each time the answer goes on."""
        self.matcher = xgrammar.GrammarMatcher(grammar)
        self._mask = mask.reshape(1, -1)
        self.bound = True
        self.stuck = False

    def follow(self, tokens: Iterable[int]) -> None:
        """Go on with ``tokens`` and fill the mask for the one behind them."""
        for token in tokens:
            self.note_accepted(token, self.matcher.accept_token(token))
            if not self.bound:
                return
        self.fill()

    def note_accepted(self, token: int, accepted: bool) -> None:
        """Take in whether the matcher accepted ``token``, which the answer goes on with."""
        if not accepted:
            self._fail(f"token {token} is not what the grammar admits")
        elif self.matcher.is_terminated():
            self.bound = False

    def fill(self) -> None:
        """Fill the mask for the next token."""
        try:
            self.matcher.fill_next_token_bitmask(self._mask)
        except RuntimeError as error:
            self._fail(str(error))
        else:
            self.note_filled()

    def note_filled(self) -> None:
        """Take in that the mask was filled: the answer is stuck where it admits no token."""
        if not self._mask.any():
            self.bound, self.stuck = False, True

    def _fail(self, reason: str) -> None:
        log.error("grammar_failed", error=reason)
        self._mask.fill(0)
        self.bound, self.stuck = False, True


class BatchGrammarMatcher:
    """Advances many answers by one token each, their masks filled by threads of xgrammar's own.

    Filling one mask of 150,000 tokens takes some 40 microseconds, which one thread for hundreds of rows adds up to more
    than a decode step; ``skiff bench structured`` measures both ways.
    """

    def __init__(self, masks: Int32, threads: int) -> None:
        """``masks`` int32[slots, words], the rows of which are the followers' masks."""
        self._masks = masks
        self._batch = xgrammar.BatchGrammarMatcher(threads)

    def follow(
        self, followers: Sequence[GrammarMatcher], slots: Sequence[int], tokens: Sequence[int]
    ) -> None:
        """Go on with one of ``tokens`` each, and fill the masks of those in ``slots`` that go on."""
        accepted = self._batch.batch_accept_token([each.matcher for each in followers], list(tokens))
        for follower, token, taken in zip(followers, tokens, accepted, strict=True):
            follower.note_accepted(token, taken)
        going = [(each, slot) for each, slot in zip(followers, slots, strict=True) if each.bound]
        filled = len(going) >= MIN_BATCH and self._fill(going)
        for follower, _ in going:
            if filled:
                follower.note_filled()
            else:
                follower.fill()

    def _fill(self, going: Sequence[tuple[GrammarMatcher, int]]) -> bool:
        """Fill the masks in the slots together; False where one fails, so that each is to be filled by itself."""
        matchers, slots = [each.matcher for each, _ in going], [slot for _, slot in going]
        try:
            self._batch.batch_fill_next_token_bitmask(matchers, self._masks, slots)
        except RuntimeError:
            return False
        return True
