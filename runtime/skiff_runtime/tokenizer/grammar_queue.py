"""Requests whose answer must match a grammar, on their way through the tokenizer process: they wait for its compilation."""

from collections.abc import Iterable
from typing import Final

from msgspec.structs import replace

from skiff_runtime.errors import CLIENT_CLOSED_REQUEST, QueueFull, RequestError
from skiff_runtime.grammar.compiler.compile_queue import GrammarCompileQueue, grammar_key
from skiff_runtime.messages import AbortRequest, FinishReason, GenerateRequest, Grammar, RequestFailed

MAX_WAITING_REQUESTS: Final = 1024
_TIMED_OUT: Final = 408


class Grammars:
    """Gives requests their compiled grammar, at once or later; others go on meanwhile."""

    def __init__(self, compilations: GrammarCompileQueue) -> None:
        self._compilations = compilations
        self._waiting: dict[bytes, dict[int, GenerateRequest]] = {}
        self._keys: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def attach(self, requests: Iterable[GenerateRequest], grammar: Grammar) -> list[GenerateRequest]:
        """The requests, ready to go on; none where they wait now. Raises ``RequestError``: none of them waits."""
        key = grammar_key(grammar)
        compiled = self._compilations.find(key)
        if compiled is not None:
            return [replace(request, grammar=compiled) for request in requests]
        waiting = list(requests)
        if len(self._keys) + len(waiting) > MAX_WAITING_REQUESTS:
            raise QueueFull(f"{len(self._keys)} requests wait for their grammar already; retry shortly")
        self._compilations.ask(key, grammar)
        self._waiting.setdefault(key, {}).update({request.uid: request for request in waiting})
        self._keys.update(dict.fromkeys((request.uid for request in waiting), key))
        return []

    def abort(self, message: AbortRequest) -> RequestFailed | None:
        """The terminal reply of a request that waits here; None when it does not."""
        key = self._keys.pop(message.uid, None)
        if key is None:
            return None
        del self._waiting[key][message.uid]
        if message.finish is FinishReason.TIMEOUT:
            text = "the request's deadline passed while its grammar was compiled"
            return RequestFailed(message.uid, _TIMED_OUT, "timeout_error", text, "request_timeout")
        text = "the request was aborted while its grammar was compiled"
        return RequestFailed(message.uid, CLIENT_CLOSED_REQUEST, "invalid_request_error", text, "aborted")

    def collect(self) -> list[GenerateRequest | RequestFailed]:
        """What has become of requests that waited."""
        decided: list[GenerateRequest | RequestFailed] = []
        for key, outcome in self._compilations.collect():
            for uid, request in self._waiting.pop(key, {}).items():
                del self._keys[uid]
                if isinstance(outcome, RequestError):
                    decided.append(RequestFailed.of(uid, outcome))
                else:
                    decided.append(replace(request, grammar=outcome))
        return decided

    def seconds_left(self, limit: float) -> float:
        """How long the process may wait for news, ``limit`` at most."""
        left = self._compilations.seconds_left()
        return limit if left is None else min(left, limit)

    def close(self) -> None:
        self._compilations.close()
