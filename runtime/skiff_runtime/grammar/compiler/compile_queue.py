"""Compilations on behalf of a tokenizer process: one after another, in a process that is watched and replaced."""

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
class _Task:
    """A grammar that waits for its compilation, or is being compiled until ``deadline``."""

    key: bytes
    grammar: Grammar
    attempts: int = 0


class GrammarCompileQueue:
    """Asks for grammars and collects them; never blocks but in ``wait``. One thread's."""

    def __init__(self, launch: Launch, poller: zmq.Poller) -> None:
        """``poller`` wakes up when a compilation has news; the owner then calls ``collect``."""
        self._timeout = launch.config.grammar_timeout_seconds
        self._launch = launch
        self._poller = poller
        self._cache = GrammarCache(CACHE_BYTES)
        self._waiting: deque[_Task] = deque()
        self._child: CompilerClient | None = None
        self._deadline: float | None = None
        self._compiling = False

    def find(self, key: bytes) -> CompiledGrammar | None:
        """A grammar that was compiled before."""
        return self._cache.get(key)

    def ask(self, key: bytes, grammar: Grammar) -> None:
        """Have a grammar compiled; ``collect`` tells the outcome. Raises ``QueueFull``."""
        if any(task.key == key for task in self._waiting):
            return
        if len(self._waiting) >= MAX_WAITING:
            raise QueueFull(f"{MAX_WAITING} grammars wait for their compilation already; retry shortly")
        self._waiting.append(_Task(key, grammar))
        self._advance()

    def collect(self) -> list[tuple[bytes, Outcome]]:
        """What has been decided since the last call, by key; also sees to limits of time."""
        outcomes: list[tuple[bytes, Outcome]] = []
        if self._child is not None:
            self._serve(self._child, outcomes)
        if self._deadline is not None and time.monotonic() > self._deadline:
            outcomes.append(self._give_up())
        self._advance()
        return outcomes

    def seconds_left(self) -> float | None:
        """Until ``collect`` should be called even without news."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def wait(self, grammar: Grammar) -> CompiledGrammar:
        """Compile while the caller waits. Raises ``RequestError``."""
        key = grammar_key(grammar)
        found = self.find(key)
        if found is not None:
            return found
        self.ask(key, grammar)
        while True:
            left = self.seconds_left()
            self._poller.poll(None if left is None else int(left * 1000) + 1)
            for told, outcome in self.collect():
                if told != key:
                    continue
                if isinstance(outcome, RequestError):
                    raise outcome
                return outcome

    def close(self) -> None:
        """End the compiler process."""
        self._waiting.clear()
        self._stop()

    def _advance(self) -> None:
        """Give the compiler its next task, starting it where there is none."""
        if not self._waiting or self._compiling:
            return
        if self._child is None:
            self._child = CompilerClient(self._launch, self._poller)
            self._deadline = time.monotonic() + START_TIMEOUT_SECONDS
        if self._child.is_ready:
            task = self._waiting[0]
            task.attempts += 1
            self._compiling = True
            self._deadline = time.monotonic() + self._timeout
            self._child.send(CompileTask(task.key, task.grammar))

    def _serve(self, child: CompilerClient, outcomes: list[tuple[bytes, Outcome]]) -> None:
        for done in child.receive():
            task = self._waiting.popleft()
            assert task.key == done.key, "results come in the order of tasks"
            self._compiling = False
            outcomes.append((task.key, self._outcome(done)))
        if child.is_ready and not self._compiling:
            self._deadline = None
        if child.ended:
            outcomes += self._lost()

    def _outcome(self, done: CompileResult) -> Outcome:
        if done.refusal is not None:
            return _refused(done.refusal)
        compiled = CompiledGrammar(done.key, done.data)
        self._cache.put(compiled)
        return compiled

    def _lost(self) -> list[tuple[bytes, Outcome]]:
        """The process has ended by itself: the task that it had is tried once more."""
        compiling, code = self._compiling, self._stop()
        log.warning("grammar_compiler_ended", exit_code=code)
        if not self._waiting:
            return []
        if not compiling:
            self._waiting[0].attempts += 1
        if self._waiting[0].attempts < MAX_ATTEMPTS:
            return []
        key = self._waiting.popleft().key
        if compiling:
            return [(key, _refused("the compiler failed at this grammar, twice; use a simpler one"))]
        return [
            (key, InternalError("the compiler of grammars does not start; the log of the server tells more"))
        ]

    def _give_up(self) -> tuple[bytes, Outcome]:
        compiling, key = self._compiling, self._waiting.popleft().key
        self._stop()
        if not compiling:
            return key, InternalError("the compiler of grammars was not ready in time; retry later")
        log.warning("grammar_compile_timed_out", timeout_seconds=self._timeout)
        return key, _refused(
            f"the grammar was not compiled within {self._timeout:g} s (--grammar-timeout-seconds); use a simpler one"
        )

    def _stop(self) -> int | None:
        """End the process; how it ended, where that is known."""
        child, self._child = self._child, None
        self._compiling = False
        self._deadline = None
        return child.close() if child is not None else None


def grammar_key(grammar: Grammar) -> bytes:
    """Equal for equal grammars, within one service."""
    return hashlib.blake2b(f"{grammar.kind}\0{grammar.source}".encode(), digest_size=16).digest()


def _refused(reason: str) -> InvalidRequest:
    return InvalidRequest(reason, code="invalid_grammar")
