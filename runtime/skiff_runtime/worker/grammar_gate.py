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

    def __init__(self, load: LoadGrammar) -> None:
        self._load = load
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
        loaded = [uid for uid, held in self._held.items() if held.loading.done()]
        return [message for uid in loaded for message in self._held.pop(uid).messages]
