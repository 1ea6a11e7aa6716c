"""Follows answers token by token under their grammars, by xgrammar: which tokens may come next.

Nothing here knows of steps or devices; ``engine.guide`` does, and calls this on threads of its own.
"""

from collections import OrderedDict
from collections.abc import Iterable
from threading import Lock
from typing import Final

from skiff_runtime import log
from skiff_runtime.grammar.library import xgrammar
from skiff_runtime.messages import CompiledGrammar
from skiff_runtime.step import Int32

MAX_GRAMMARS: Final = 256
MAX_GRAMMAR_BYTES: Final = 512 << 20


class GrammarShelf:
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


class Follower:
    """One answer under one grammar.

    ``bound``: the mask says which tokens may come next. ``stuck``: none may, or one came that may not have.
    Neither: the grammar has ended with its answer, and what comes behind is free.
    """

    def __init__(self, grammar: xgrammar.CompiledGrammar, mask: Int32) -> None:
        """``mask`` int32[words] is filled each time the answer goes on."""
        self._matcher = xgrammar.GrammarMatcher(grammar)
        self._mask = mask.reshape(1, -1)
        self.bound = True
        self.stuck = False

    def follow(self, tokens: Iterable[int]) -> None:
        """Go on with ``tokens`` and fill the mask for the one behind them."""
        try:
            self._accept(tokens)
            if self.bound:
                self._matcher.fill_next_token_bitmask(self._mask)
        except RuntimeError as error:
            log.error("grammar_failed", error=str(error))
            self._mask.fill(0)
        if self.bound and not self._mask.any():
            self.bound, self.stuck = False, True

    def _accept(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            if not self._matcher.accept_token(token):
                raise RuntimeError(f"token {token} is not what the grammar admits")
            if self._matcher.is_terminated():
                self.bound = False
                return
