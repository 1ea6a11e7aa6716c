"""The LoRA slots: which adapter each holds, and how many running requests use it."""

from typing import Final

from skiff_runtime.step import LoraLoad

EMPTY: Final = 0
"""The adapter of a slot that holds none; ids of adapters begin at 1."""


class LoraSlots:
    """A table of ``count`` slots. An adapter in a slot is resident; it can be replaced while no request uses the slot.

    Decides by a count of uses, never by time, so that all ranks replace the same adapter.
    """

    def __init__(self, count: int) -> None:
        self._adapters = [EMPTY] * count
        self._users = [0] * count
        self._last_used = [0] * count
        self._slots: dict[int, int] = {}
        self._uses = 0
        self.num_loads = 0
        """Loads into slots since the start."""
        self.num_evictions = 0
        """Loads that evicted another adapter."""

    @property
    def num_unused(self) -> int:
        """Slots that no request uses, whether or not they hold an adapter."""
        return self._users.count(0)

    def is_resident(self, adapter_id: int) -> bool:
        """Return whether an adapter is in a slot."""
        return adapter_id in self._slots

    def is_used(self, adapter_id: int) -> bool:
        """Return whether an adapter is in a slot that a request uses."""
        slot = self._slots.get(adapter_id)
        return slot is not None and self._users[slot] > 0

    def resident_adapters(self) -> list[int]:
        """Return the adapters in slots, in ascending order of ids."""
        return sorted(self._slots)

    def used_adapters(self) -> list[int]:
        """Return those of them that requests use, in ascending order of ids."""
        return sorted(adapter for adapter, slot in self._slots.items() if self._users[slot])

    def acquire(self, adapter_id: int) -> tuple[int, LoraLoad | None]:
        """Count one more user of an adapter; return its slot, and the load of the adapter if it was not resident.

        The adapter takes an empty slot if there is one, else the one that was unused for the longest time. The caller has
        checked that the adapter is resident, or that a slot is unused.
        """
        slot = self._slots.get(adapter_id)
        load = None
        if slot is None:
            slot = self._find_replaceable()
            load = self._put(slot, adapter_id)
        self._users[slot] += 1
        self._touch(slot)
        return slot, load

    def release(self, slot: int) -> bool:
        """Count one user of a slot less; return whether that leaves it unused."""
        assert self._users[slot] > 0, f"LoRA slot {slot} is released more often than acquired"
        self._users[slot] -= 1
        self._touch(slot)
        return not self._users[slot]

    def vacate(self, adapter_id: int) -> None:
        """Empty the unused slot of an adapter that is unloaded; no-op if it has none."""
        slot = self._slots.pop(adapter_id, None)
        if slot is not None:
            assert not self._users[slot]
            self._adapters[slot] = EMPTY
            self._last_used[slot] = 0

    def check(self, used: list[int]) -> None:
        """Assert that the users are the requests whose slots are ``used``, one entry for each request."""
        assert self._users == [used.count(slot) for slot in range(len(self._users))]
        assert self._slots == {each: slot for slot, each in enumerate(self._adapters) if each != EMPTY}

    def _find_replaceable(self) -> int:
        unused = [slot for slot, users in enumerate(self._users) if not users]
        return min(unused, key=lambda slot: (self._adapters[slot] != EMPTY, self._last_used[slot], slot))

    def _put(self, slot: int, adapter_id: int) -> LoraLoad:
        replaced = self._adapters[slot]
        if replaced != EMPTY:
            del self._slots[replaced]
            self.num_evictions += 1
        self._adapters[slot] = adapter_id
        self._slots[adapter_id] = slot
        self.num_loads += 1
        return LoraLoad(slot, adapter_id)

    def _touch(self, slot: int) -> None:
        self._uses += 1
        self._last_used[slot] = self._uses
