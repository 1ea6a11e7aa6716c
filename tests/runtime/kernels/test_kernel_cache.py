"""The directory of compiled kernels: what one process compiles, the next one finds, beside the kernels of the image."""

import os
import threading
from pathlib import Path

import pytest

from skiff_runtime.kernels import kernel_cache


@pytest.fixture(autouse=True)
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The kernels of an image; and variables that are restored."""
    image = tmp_path / "image"
    for name in (kernel_cache.TRITON_FOLDER, kernel_cache.FLASHINFER_FOLDER):
        (image / name / "KEY").mkdir(parents=True)
        (image / name / "KEY" / "kernel").write_text("prebuilt")
        (image / name / "KEY").chmod(0o555)
    monkeypatch.setattr(kernel_cache, "PREBUILT_DIRECTORY", image)
    monkeypatch.setattr(kernel_cache, "_directories", [])
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", "")
    return image


def test_second_process_finds_what_the_first_one_compiled(tmp_path: Path) -> None:
    directory = tmp_path / "volume" / "key"
    kernel_cache.activate(directory, tmp_path / "scratch")
    triton = Path(os.environ["TRITON_CACHE_DIR"])
    assert triton == directory / "triton"
    assert Path(os.environ["FLASHINFER_WORKSPACE_BASE"]) == tmp_path / "scratch" / "flashinfer"
    assert (triton / "KEY" / "kernel").read_text() == "prebuilt"
    (triton / "NEW").mkdir()
    kernel_cache.activate(directory, tmp_path / "scratch of another pod")
    assert sorted(path.name for path in Path(os.environ["TRITON_CACHE_DIR"]).iterdir()) == ["KEY", "NEW"]


def test_kernels_of_the_image_are_copied_once_by_processes_that_start_together(tmp_path: Path) -> None:
    directory = tmp_path / "volume"
    directory.mkdir()
    threads = [threading.Thread(target=kernel_cache._copy_prebuilt, args=(directory,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(path.name for path in directory.iterdir()) == ["flashinfer", "triton"]
    assert (directory / "flashinfer" / "KEY" / "kernel").read_text() == "prebuilt"


def test_kernels_of_the_image_are_used_in_place_by_default(image: Path, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in image.rglob("*")}
    kernel_cache.activate(image, tmp_path / "scratch")
    assert {path: path.stat().st_mtime_ns for path in image.rglob("*")} == before
