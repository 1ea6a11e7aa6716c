"""Where rank 0 holds requests back until their grammars have been read: a step that waited for one would hold up all."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from skiff_runtime.messages import AbortRequest, CompiledGrammar, GenerateRequest, ToScheduler

Read = Callable[[CompiledGrammar], "Future[None] | None"]
"""Begins to read a grammar; None where it is at hand."""


@dataclass(frozen=True, slots=True)
class _Held:
    reading: "Future[None]"
    items: list[ToScheduler]


class GrammarGate:
    """Lets everything pass but requests whose grammar is being read, and what concerns these."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._held: dict[int, _Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, uid: int) -> bool:
        return uid in self._held

    def admit(self, arrived: Sequence[ToScheduler]) -> list[ToScheduler]:
        """What may go on now: requests that were held until their grammar was read, then what else has arrived."""
        admitted = self._release()
        for item in arrived:
            if isinstance(item, AbortRequest) and item.uid in self._held:
                self._held[item.uid].items.append(item)
            elif not self._hold(item):
                admitted.append(item)
        return admitted

    def _hold(self, item: ToScheduler) -> bool:
        if not isinstance(item, GenerateRequest) or item.grammar is None:
            return False
        reading = self._read(item.grammar)
        if reading is None:
            return False
        self._held[item.uid] = _Held(reading, [item])
        return True

    def _release(self) -> list[ToScheduler]:
        ready = [uid for uid, held in self._held.items() if held.reading.done()]
        return [item for uid in ready for item in self._held.pop(uid).items]
