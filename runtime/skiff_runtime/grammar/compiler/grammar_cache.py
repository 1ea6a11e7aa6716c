"""LRU cache of compiled grammars in their serialized form."""

from collections import OrderedDict

from skiff_runtime.messages import CompiledGrammar


class GrammarCache:
    """Holds at most ``limit_bytes`` of serialized grammars."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._grammars: OrderedDict[bytes, CompiledGrammar] = OrderedDict()
        self.size_bytes = 0

    def get(self, key: bytes) -> CompiledGrammar | None:
        """Return the grammar of ``key`` and mark it as used now."""
        grammar = self._grammars.get(key)
        if grammar is not None:
            self._grammars.move_to_end(key)
        return grammar

    def put(self, grammar: CompiledGrammar) -> None:
        """Add a grammar, unless it alone exceeds the limit."""
        if grammar.key in self._grammars or len(grammar.data) > self._limit_bytes:
            return
        self._grammars[grammar.key] = grammar
        self.size_bytes += len(grammar.data)
        while self.size_bytes > self._limit_bytes:
            _, evicted = self._grammars.popitem(last=False)
            self.size_bytes -= len(evicted.data)
