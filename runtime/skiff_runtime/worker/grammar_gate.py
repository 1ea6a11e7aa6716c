"""The grammar gate of rank 0: holds requests back until their compiled grammars are loaded.

Loading a large grammar takes longer than a step, and a step that waited for it would delay every running request.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from skiff_runtime.messages import AbortRequest, CompiledGrammar, GenerateRequest, ToScheduler

LoadGrammar = Callable[[CompiledGrammar], "Future[None] | None"]
"""Starts to load a grammar; returns None if it is loaded already."""


@dataclass(frozen=True, slots=True)
class _HeldRequest:
    loading: "Future[None]"
    messages: list[ToScheduler]
    """The request, and aborts of it that arrived meanwhile."""


class GrammarGate:
    """Passes messages on, except requests whose grammar is still loading, and aborts of these."""

    def __init__(self, load: LoadGrammar, *, max_released_bytes: int) -> None:
        """After ``max_released_bytes`` of requests, and of their different grammars, no further one is let in at a time."""
        self._load = load
        self._max_released_bytes = max_released_bytes
        self._held: dict[int, _HeldRequest] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, uid: int) -> bool:
        return uid in self._held

    def admit(self, arrived: Sequence[ToScheduler]) -> list[ToScheduler]:
        """Return the messages that may proceed: held requests whose grammar is loaded, then the new messages."""
        admitted = self._release()
        for message in arrived:
            if isinstance(message, AbortRequest) and message.uid in self._held:
                self._held[message.uid].messages.append(message)  # it must not overtake its request
            elif not self._hold(message):
                admitted.append(message)
        return admitted

    def _hold(self, message: ToScheduler) -> bool:
        if not isinstance(message, GenerateRequest) or message.grammar is None:
            return False
        loading = self._load(message.grammar)
        if loading is None:
            return False
        self._held[message.uid] = _HeldRequest(loading, [message])
        return True

    def _release(self) -> list[ToScheduler]:
        released: list[ToScheduler] = []
        grammars, size = dict[bytes, int](), 0
        for uid in [uid for uid, held in self._held.items() if held.loading.done()]:
            if size + sum(grammars.values()) >= self._max_released_bytes:
                break
            for message in self._held.pop(uid).messages:
                released.append(message)
                if isinstance(message, GenerateRequest) and message.grammar is not None:
                    size += len(message.token_ids)
                    grammars[message.grammar.key] = len(message.grammar.data)
        return released
