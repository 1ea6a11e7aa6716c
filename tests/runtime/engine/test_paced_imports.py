"""Paced imports: they pause, longer while steps run, unless somebody waits, and only in their own thread."""

import importlib
import sys
import threading
import time
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from skiff_runtime.engine import paced_imports as module
from skiff_runtime.engine.paced_imports import paced_imports

MODULES = 20


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Name a package that imports all of its modules."""
    directory = tmp_path / "paced_example"
    directory.mkdir()
    names = [f"part{number}" for number in range(MODULES)]
    for name in names:
        (directory / f"{name}.py").touch()
    (directory / "__init__.py").write_text("".join(f"from paced_example import {name}\n" for name in names))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(module, "PAUSE_SECONDS", 0.02)
    before = set(sys.modules)
    yield directory.name
    for name in set(sys.modules) - before:
        del sys.modules[name]


def seconds_to_import(name: str) -> float:
    begin = time.monotonic()
    importlib.import_module(name)
    return time.monotonic() - begin


def test_imports_pause_before_each_module(package: str) -> None:
    finders, interval = list(sys.meta_path), sys.getswitchinterval()
    with paced_imports(threading.Event(), lambda: False):
        assert seconds_to_import(package) >= MODULES * module.PAUSE_SECONDS
    assert sys.meta_path == finders and sys.getswitchinterval() == interval


def test_imports_rest_while_steps_run(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise this would take an hour."""
    monkeypatch.setattr(module, "BUSY_PAUSE_SECONDS", 3600.0)
    busy_until = time.monotonic() + 0.5
    with paced_imports(threading.Event(), lambda: time.monotonic() < busy_until):
        assert seconds_to_import(package) >= 0.5


def test_imports_of_a_process_that_is_always_busy_end(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUSY_PAUSE_SECONDS", 0.05)
    with paced_imports(threading.Event(), lambda: True):
        assert seconds_to_import(package) >= MODULES * 0.05


def test_imports_hurry_when_somebody_waits(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise this would take an hour."""
    monkeypatch.setattr(module, "PAUSE_SECONDS", 3600 / MODULES)
    hurry = threading.Event()
    with paced_imports(hurry, lambda: True):
        threading.Timer(0.05, hurry.set).start()
        importlib.import_module(package)
    assert package in sys.modules


def test_imports_of_other_threads_do_not_pause(package: str) -> None:
    hurry = threading.Event()

    def fail(timeout: float | None = None) -> bool:
        raise AssertionError("another thread was paced")

    hurry.wait = fail  # type: ignore[method-assign]
    with paced_imports(hurry, lambda: True):
        thread = threading.Thread(target=importlib.import_module, args=(package,))
        thread.start()
        thread.join()
    assert package in sys.modules


def test_import_that_is_looking_for_its_module_still_finds_it_when_pacing_ends(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pacing = paced_imports(threading.Event(), lambda: False)

    class Finder:
        """Ends the pacing while the import of another thread is at this finder."""

        def find_spec(self, name: str, *_: object) -> None:
            if name == package:
                pacing.__exit__(None, None, None)

    place = sys.meta_path.index(PathFinder)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path[:place], Finder(), *sys.meta_path[place:]])
    pacing.__enter__()
    thread = threading.Thread(target=importlib.import_module, args=(package,))
    thread.start()
    thread.join()
    assert package in sys.modules
