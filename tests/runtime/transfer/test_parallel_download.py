"""The end of a parallel download that fails: nothing is published afterwards, and no file stays open."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from service import wait_until

from skiff_runtime.errors import FetchError
from skiff_runtime.transfer.parallel_download import download_all
from skiff_runtime.transfer.range_source import RemoteObject

TIMEOUT_SECONDS = 30


class Source:
    """A source whose file ``bad`` fails, once the last piece of ``slow`` is on its way."""

    def __init__(self) -> None:
        self.is_sending = threading.Event()
        self.may_send = threading.Event()

    def supports_ranges(self, remote: RemoteObject) -> bool:
        return True

    def stream(self, remote: RemoteObject, start: int, stop: int) -> Iterator[bytes]:
        if remote.name == "bad":
            assert self.is_sending.wait(TIMEOUT_SECONDS)
            raise FetchError("bad is gone")
        self.is_sending.set()
        assert self.may_send.wait(TIMEOUT_SECONDS)
        yield b"x" * (stop - start)


def open_files_below(directory: Path) -> list[str]:
    found: list[str] = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.append(str(path.readlink()))
    return [each for each in found if each.startswith(str(directory))]


def test_file_that_is_complete_after_the_failure_is_not_published(tmp_path: Path) -> None:
    source, before = Source(), set(threading.enumerate())
    files = [RemoteObject(name, name, 1000) for name in ("slow", "bad")]
    with pytest.raises(FetchError, match="bad is gone"):
        download_all(source, files, tmp_path / "model", tmp_path / "scratch")
    threads = [each for each in threading.enumerate() if each not in before]
    assert open_files_below(tmp_path), "a thread still writes"
    source.may_send.set()
    for thread in threads:
        thread.join(TIMEOUT_SECONDS)
    assert not (tmp_path / "model" / "slow").exists()
    wait_until(lambda: not open_files_below(tmp_path))


def test_descriptors_are_closed_if_the_files_cannot_be_sent(tmp_path: Path) -> None:
    source = Source()
    source.is_sending.set()
    with pytest.raises(FetchError):
        download_all(source, [RemoteObject("bad", "bad", 1000)], tmp_path / "model", tmp_path / "scratch")
    wait_until(lambda: not open_files_below(tmp_path))
