"""Nothing that is put into a batch writer is lost or reordered, and putting never waits."""

import subprocess
import sys
import threading
import time

import pytest

from skiff_runtime import batch_writer
from skiff_runtime.batch_writer import BatchWriter


def test_all_items_are_written_in_order_and_in_few_batches() -> None:
    batches: list[list[int]] = []
    writer: BatchWriter[int] = BatchWriter("test", batches.append)
    for number in range(5000):
        writer.put(number)
    writer.close()
    assert [number for batch in batches for number in batch] == list(range(5000))
    assert max(map(len, batches)) <= batch_writer.MAX_ITEMS_PER_WRITE
    assert writer.dropped == 0


def test_an_item_is_written_without_another_one_behind_it() -> None:
    written = threading.Event()
    writer: BatchWriter[int] = BatchWriter("test", lambda items: written.set())
    for _ in range(3):
        writer.put(1)
        assert written.wait(10)
        written.clear()
    writer.close()


def test_items_beyond_the_limit_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_writer, "MAX_WAITING_ITEMS", 10)
    began, may_go_on, written = threading.Event(), threading.Event(), list[int]()

    def write(items: list[int]) -> None:
        began.set()
        may_go_on.wait(10)
        written.extend(items)

    writer = BatchWriter("test", write)
    writer.put(-1)
    assert began.wait(10)  # and writes until it may go on
    for number in range(25):
        writer.put(number)
    assert writer.dropped == 15
    may_go_on.set()
    writer.close()
    assert written == [-1, *range(10)]


def test_close_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_writer, "CLOSE_SECONDS", 0.1)
    may_go_on = threading.Event()

    def write(items: list[int]) -> None:
        may_go_on.wait(10)

    writer = BatchWriter("test", write)
    writer.put(1)
    writer.close()
    may_go_on.set()


PROGRAM = """
import logging
from skiff_runtime import log
log.configure("router", "info", batched=True)
for number in range(2000):
    log.event("request", number=number)
log.warning("odd", reason="a b")
logging.getLogger("library").error("of a library")
try:
    raise KeyError("gone")
except KeyError:
    log.error("failed", exc_info=True)
log.debug("unseen")
"""


def test_a_batched_log_is_complete_when_its_process_ends() -> None:
    began = time.strftime("%Y-%m-%dT", time.gmtime())
    lines = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60
    ).stderr.splitlines()
    assert [line.split(" ", 1)[1] for line in lines[:2001]] == [
        *(f"info router request number={number}" for number in range(2000)),
        'warning router odd reason="a b"',
    ]
    assert lines[0].startswith(began) or lines[0] > began
    assert lines[2001].endswith("error router of a library")
    assert lines[2002].endswith("error router failed")
    assert lines[2003:] == [
        "Traceback (most recent call last):",
        '  File "<string>", line 10, in <module>',
        "KeyError: 'gone'",
    ]
