"""Reads of LoRA adapters beside the steps, on rank 0 and on the others."""

import threading
import time
from concurrent.futures import Future

import pytest

from skiff_runtime.errors import ModelError
from skiff_runtime.messages import AdapterRead
from skiff_runtime.processes.launch import StartAdapter
from skiff_runtime.worker.adapter_reader import AdapterReader, AdapterReadFailed


class Registry:
    """Host copies by id. Paths with ``bad`` are refused, those with ``broken`` raise an error of another kind."""

    def __init__(self) -> None:
        self.adapters: dict[int, str] = {}
        self.may_read = threading.Event()
        self.may_read.set()

    def register_adapter(self, adapter_id: int, path: str) -> None:
        assert self.may_read.wait(30)
        if "bad" in path:
            raise ModelError(f"{path} has rank 64")
        if "broken" in path:
            raise ValueError("bad header")
        self.adapters[adapter_id] = path

    def unregister_adapter(self, adapter_id: int) -> None:
        del self.adapters[adapter_id]


def take(reader: AdapterReader) -> list[AdapterRead]:
    """Wait until all reads have ended; return them."""
    ended: list[AdapterRead] = []
    deadline = time.monotonic() + 30
    while reader.is_reading:
        assert time.monotonic() < deadline
        ended += reader.take_finished()
    return ended


def test_reads_end_in_order_and_a_bad_one_harms_nobody() -> None:
    registry = Registry()
    registry.may_read.clear()
    reader = AdapterReader(registry)
    for adapter_id, path in enumerate(["good", "bad", "broken", "fine"], 1):
        reader.begin_read(adapter_id, path)
    assert reader.is_reading and reader.take_finished() == []
    registry.may_read.set()
    assert take(reader) == [
        AdapterRead(1),
        AdapterRead(2, "bad has rank 64"),
        AdapterRead(3, "ValueError: bad header"),
        AdapterRead(4),
    ]
    reader.drop(1)
    assert registry.adapters == {4: "fine"}
    reader.close()


def test_reads_that_end_while_their_ends_are_taken_stay_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry()
    registry.may_read.clear()
    reader = AdapterReader(registry)
    for adapter_id in (1, 2):
        reader.begin_read(adapter_id, "good")
    done = Future.done

    def let_all_end_after_the_first_look(future: Future[None]) -> bool:
        was_done = done(future)
        registry.may_read.set()
        while len(registry.adapters) < 2:
            time.sleep(0.001)
        return was_done

    monkeypatch.setattr(Future, "done", let_all_end_after_the_first_look)
    assert take(reader) == [AdapterRead(1), AdapterRead(2)]
    reader.close()


def test_other_rank_waits_for_its_own_read_and_beats_meanwhile() -> None:
    registry = Registry()
    registry.may_read.clear()
    reader = AdapterReader(registry)
    reader.begin_read(1, "good")
    reader.settle(AdapterRead(1), registry.may_read.set)
    assert registry.adapters == {1: "good"} and not reader.is_reading
    reader.close()


def test_other_rank_drops_what_rank_0_could_not_read_and_fails_where_it_alone_fails() -> None:
    registry = Registry()
    reader = AdapterReader(registry)
    reader.begin_read(1, "good")
    reader.settle(AdapterRead(1, "no memory"), lambda: None)
    assert registry.adapters == {}
    reader.begin_read(2, "bad")
    reader.settle(AdapterRead(2, "has rank 64"), lambda: None)
    reader.begin_read(3, "bad")
    with pytest.raises(AdapterReadFailed, match="rank 64"):
        reader.settle(AdapterRead(3), lambda: None)
    reader.close()


def test_adapters_of_the_start_are_all_checked_and_as_many_kept_as_fit() -> None:
    registry = Registry()
    reader = AdapterReader(registry)
    adapters = [StartAdapter(each, f"a{each}", f"hf://org/{each}", f"path{each}") for each in (1, 2, 3)]
    bad = StartAdapter(4, "sql", "hf://org/sql", "bad")
    assert reader.preload([bad, *adapters], host_limit=2) == {4: "bad has rank 64"}
    assert registry.adapters == {1: "path1", 2: "path2"}
    reader.close()
