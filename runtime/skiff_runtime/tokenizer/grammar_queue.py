"""Grammar queue of a tokenizer process: requests wait in it until their grammar is compiled."""

from collections.abc import Iterable
from typing import Final

from msgspec.structs import replace

from skiff_runtime.errors import CLIENT_CLOSED_REQUEST, QueueFull, RequestError
from skiff_runtime.grammar.compiler.compile_queue import GrammarCompileQueue, grammar_key
from skiff_runtime.messages import AbortRequest, FinishReason, GenerateRequest, Grammar, RequestFailed

MAX_WAITING_REQUESTS: Final = 1024
_REQUEST_TIMEOUT: Final = 408


class GrammarQueue:
    """Attaches compiled grammars to requests, at once or later. Requests without a grammar do not wait behind these."""

    def __init__(self, compile_queue: GrammarCompileQueue) -> None:
        self._compile_queue = compile_queue
        self._waiting: dict[bytes, dict[int, GenerateRequest]] = {}
        self._keys: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def attach(self, requests: Iterable[GenerateRequest], grammar: Grammar) -> list[GenerateRequest]:
        """Return the requests with their grammar if it is compiled already; otherwise queue them and return none.

        Raises ``RequestError`` if they cannot be queued; then none of them is.
        """
        key = grammar_key(grammar)
        compiled = self._compile_queue.find(key)
        if compiled is not None:
            return [replace(request, grammar=compiled) for request in requests]
        waiting = list(requests)
        if len(self._keys) + len(waiting) > MAX_WAITING_REQUESTS:
            raise QueueFull(
                f"{len(self._keys)} requests are already waiting for their grammars; retry shortly"
            )
        self._compile_queue.submit(key, grammar)
        self._waiting.setdefault(key, {}).update({request.uid: request for request in waiting})
        self._keys.update(dict.fromkeys((request.uid for request in waiting), key))
        return []

    def abort(self, message: AbortRequest) -> RequestFailed | None:
        """Remove a request and return its terminal reply; return None if it is not in the queue."""
        key = self._keys.pop(message.uid, None)
        if key is None:
            return None
        del self._waiting[key][message.uid]
        if message.finish is FinishReason.TIMEOUT:
            text = "the request's deadline passed while its grammar was being compiled"
            return RequestFailed(message.uid, _REQUEST_TIMEOUT, "timeout_error", text, "request_timeout")
        text = "the request was aborted while its grammar was being compiled"
        return RequestFailed(message.uid, CLIENT_CLOSED_REQUEST, "invalid_request_error", text, "aborted")

    def pop_decided(self) -> list[GenerateRequest | RequestFailed]:
        """Return the requests whose grammar was compiled since the last call, and the refusals of the others."""
        decided: list[GenerateRequest | RequestFailed] = []
        for key, outcome in self._compile_queue.pop_outcomes():
            for uid, request in self._waiting.pop(key, {}).items():
                del self._keys[uid]
                if isinstance(outcome, RequestError):
                    decided.append(RequestFailed.of(uid, outcome))
                else:
                    decided.append(replace(request, grammar=outcome))
        return decided

    def seconds_left(self, limit: float) -> float:
        """Return the seconds for which the process may sleep, at most ``limit``."""
        left = self._compile_queue.seconds_left()
        return limit if left is None else min(left, limit)

    def close(self) -> None:
        self._compile_queue.close()
