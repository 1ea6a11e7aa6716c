"""Cache of the grammars that a rank has loaded: deserialized by xgrammar and ready to make matchers."""

from collections import OrderedDict
from threading import Lock
from typing import Final

import xgrammar

from skiff_runtime.messages import CompiledGrammar

MAX_GRAMMARS: Final = 256
MAX_GRAMMAR_BYTES: Final = 512 << 20


class LoadedGrammarCache:
    """LRU cache of deserialized grammars, limited by count and by size. Thread-safe.

    A grammar can be megabytes that take a second to load, so the lock is not held meanwhile: other threads get
    cached grammars while one is loaded.
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
        """Return the loaded grammar; deserialize it first if it is not cached.

        Raises ``RuntimeError`` if the data was not compiled for this vocabulary by this version of xgrammar.
        """
        with self._lock:
            cached = self._grammars.get(grammar.key)
            if cached is not None:
                self._grammars.move_to_end(grammar.key)
                return cached
        loaded = xgrammar.CompiledGrammar.deserialize_json(grammar.data.decode(), self._vocabulary)
        with self._lock:
            return self._put(grammar.key, loaded)

    def _put(self, key: bytes, grammar: xgrammar.CompiledGrammar) -> xgrammar.CompiledGrammar:
        # Two threads may have loaded the same grammar at once. The first one in wins, so that its size counts once.
        cached = self._grammars.setdefault(key, grammar)
        if cached is grammar:
            self._bytes += grammar.memory_size_bytes
        # The newest grammar stays even if it alone exceeds the limit: a request needs it now.
        while len(self) > 1 and (len(self) > self._max_grammars or self._bytes > self._max_bytes):
            _, evicted = self._grammars.popitem(last=False)
            self._bytes -= evicted.memory_size_bytes
        return cached
