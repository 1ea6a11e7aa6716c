"""Compiled grammars by key, the least recently used forgotten first."""

from collections import OrderedDict

from skiff_runtime.messages import CompiledGrammar


class GrammarCache:
    """Holds at most ``limit_bytes`` of compiled data."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._held: OrderedDict[bytes, CompiledGrammar] = OrderedDict()
        self.size_bytes = 0

    def get(self, key: bytes) -> CompiledGrammar | None:
        """The grammar of ``key``, which counts as used now."""
        found = self._held.get(key)
        if found is not None:
            self._held.move_to_end(key)
        return found

    def put(self, grammar: CompiledGrammar) -> None:
        """Keep a grammar, unless it alone exceeds the limit."""
        if grammar.key in self._held or len(grammar.data) > self._limit:
            return
        self._held[grammar.key] = grammar
        self.size_bytes += len(grammar.data)
        while self.size_bytes > self._limit:
            _, oldest = self._held.popitem(last=False)
            self.size_bytes -= len(oldest.data)
