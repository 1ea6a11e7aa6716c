"""Queue of grammars to compile, one after another, in a child process that is supervised and replaced."""

import hashlib
import time
from collections import deque
from dataclasses import dataclass
from typing import Final

import zmq

from skiff_runtime import log
from skiff_runtime.errors import InternalError, InvalidRequest, QueueFull, RequestError
from skiff_runtime.grammar.compiler.compiler_client import CompilerClient
from skiff_runtime.grammar.compiler.grammar_cache import GrammarCache
from skiff_runtime.grammar.compiler.pipe_protocol import CompileResult, CompileTask
from skiff_runtime.messages import CompiledGrammar, Grammar
from skiff_runtime.processes.launch import Launch

CACHE_BYTES: Final = 256 << 20
MAX_WAITING: Final = 64
START_TIMEOUT_SECONDS: Final = 120.0
MAX_ATTEMPTS: Final = 2

Outcome = CompiledGrammar | RequestError


@dataclass(slots=True)
class _QueuedGrammar:
    """A grammar that waits for its compilation or is being compiled."""

    key: bytes
    grammar: Grammar
    attempts: int = 0


class GrammarCompileQueue:
    """Compiles grammars in order and caches them. Never blocks, except in ``compile``. Not thread-safe.

    The compiler process is started for the first grammar, because many services never need one. The first grammar of
    ``_waiting`` is the one that the process compiles, if ``_is_compiling``. ``_deadline`` limits the start of the
    process until it is ready, and each compilation after that: a compilation cannot be interrupted, so when it takes
    too long the process is killed, and the next grammar gets a new one.
    """

    def __init__(self, launch: Launch, poller: zmq.Poller) -> None:
        """``poller`` wakes up when the compiler process sends something; the owner then calls ``pop_outcomes``."""
        self._timeout_seconds = launch.config.grammar_timeout_seconds
        self._launch = launch
        self._poller = poller
        self._cache = GrammarCache(CACHE_BYTES)
        self._waiting: deque[_QueuedGrammar] = deque()
        self._compiler: CompilerClient | None = None
        self._deadline: float | None = None
        self._is_compiling = False

    def find(self, key: bytes) -> CompiledGrammar | None:
        """Return a grammar that was compiled before."""
        return self._cache.get(key)

    def submit(self, key: bytes, grammar: Grammar) -> None:
        """Queue a grammar; ``pop_outcomes`` returns its outcome later. Raises ``QueueFull``."""
        if any(queued.key == key for queued in self._waiting):
            return
        if len(self._waiting) >= MAX_WAITING:
            raise QueueFull(
                f"{MAX_WAITING} grammars are already waiting for their compilation; retry shortly"
            )
        self._waiting.append(_QueuedGrammar(key, grammar))
        self._advance()

    def pop_outcomes(self) -> list[tuple[bytes, Outcome]]:
        """Return the outcomes since the last call, by key. Also enforces the time limits."""
        outcomes: list[tuple[bytes, Outcome]] = []
        if self._compiler is not None:
            self._receive(self._compiler, outcomes)
        if self._deadline is not None and time.monotonic() > self._deadline:
            outcomes.append(self._time_out())
        self._advance()
        return outcomes

    def seconds_left(self) -> float | None:
        """Return the seconds until ``pop_outcomes`` must be called even without a wake-up; None: no limit."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Compile a grammar and block until it is done. Raises ``RequestError``."""
        key = grammar_key(grammar)
        cached = self.find(key)
        if cached is not None:
            return cached
        self.submit(key, grammar)
        while True:
            left = self.seconds_left()
            self._poller.poll(None if left is None else int(left * 1000) + 1)
            for decided_key, outcome in self.pop_outcomes():
                if decided_key != key:
                    continue
                if isinstance(outcome, RequestError):
                    raise outcome
                return outcome

    def close(self) -> None:
        """End the compiler process."""
        self._waiting.clear()
        self._stop()

    def _advance(self) -> None:
        """Send the compiler its next grammar; start the process if it does not run."""
        if not self._waiting or self._is_compiling:
            return
        if self._compiler is None:
            self._compiler = CompilerClient(self._launch, self._poller)
            self._deadline = time.monotonic() + START_TIMEOUT_SECONDS
        if self._compiler.is_ready:
            queued = self._waiting[0]
            queued.attempts += 1
            self._is_compiling = True
            self._deadline = time.monotonic() + self._timeout_seconds
            self._compiler.send(CompileTask(queued.key, queued.grammar))

    def _receive(self, compiler: CompilerClient, outcomes: list[tuple[bytes, Outcome]]) -> None:
        for result in compiler.receive():
            queued = self._waiting.popleft()
            assert queued.key == result.key, "results arrive in the order of tasks"
            self._is_compiling = False
            outcomes.append((queued.key, self._outcome_of(result)))
        if compiler.is_ready and not self._is_compiling:
            self._deadline = None
        if compiler.has_ended:
            outcomes += self._handle_exit()

    def _outcome_of(self, result: CompileResult) -> Outcome:
        if result.refusal is not None:
            return _invalid_grammar(result.refusal)
        compiled = CompiledGrammar(result.key, result.data)
        self._cache.put(compiled)
        return compiled

    def _handle_exit(self) -> list[tuple[bytes, Outcome]]:
        """Retry the first grammar after the process ended by itself; fail it after ``MAX_ATTEMPTS``."""
        was_compiling, code = self._is_compiling, self._stop()
        log.warning("grammar_compiler_ended", exit_code=code)
        if not self._waiting:
            return []
        if not was_compiling:
            # The process ended before it was ready, so this start is an attempt that _advance did not count.
            self._waiting[0].attempts += 1
        if self._waiting[0].attempts < MAX_ATTEMPTS:
            return []
        key = self._waiting.popleft().key
        if was_compiling:
            return [(key, _invalid_grammar("the compiler failed on this grammar twice; use a simpler one"))]
        return [
            (key, InternalError("the grammar compiler does not start; see the server's log for the reason"))
        ]

    def _time_out(self) -> tuple[bytes, Outcome]:
        was_compiling, key = self._is_compiling, self._waiting.popleft().key
        self._stop()
        if not was_compiling:
            return key, InternalError("the grammar compiler did not start in time; retry later")
        log.warning("grammar_compile_timed_out", timeout_seconds=self._timeout_seconds)
        return key, _invalid_grammar(
            f"the grammar was not compiled within {self._timeout_seconds:g} s (--grammar-timeout-seconds); "
            "use a simpler one"
        )

    def _stop(self) -> int | None:
        """End the process. Return its exit code, None if there was no process."""
        compiler, self._compiler = self._compiler, None
        self._is_compiling = False
        self._deadline = None
        return compiler.close() if compiler is not None else None


def grammar_key(grammar: Grammar) -> bytes:
    """Return a hash of the grammar: equal grammars have equal keys, within one service."""
    return hashlib.blake2b(f"{grammar.kind}\0{grammar.source}".encode(), digest_size=16).digest()


def _invalid_grammar(reason: str) -> InvalidRequest:
    return InvalidRequest(reason, code="invalid_grammar")
