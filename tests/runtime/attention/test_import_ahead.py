"""The import of FlashInfer: skipped where none of its kernels is compiled, and never begun without a GPU."""

from pathlib import Path

import pytest
import torch

from skiff_runtime.attention.selector import import_ahead
from skiff_runtime.kernels import kernel_cache


@pytest.fixture(autouse=True)
def no_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cache, "_directories", [])
    monkeypatch.setattr(kernel_cache, "find_spec", lambda name: None)


def test_without_a_directory_its_kernels_may_be_anywhere() -> None:
    assert kernel_cache.may_have_flashinfer_modules()


def test_directory_decides(tmp_path: Path) -> None:
    kernel_cache._directories.append(tmp_path)
    assert not kernel_cache.may_have_flashinfer_modules()
    folder = (
        tmp_path
        / kernel_cache.FLASHINFER_FOLDER
        / ".cache"
        / "flashinfer"
        / "0.6"
        / "90a"
        / "cached_ops"
        / "prefill"
    )
    folder.mkdir(parents=True)
    (folder / "build.ninja").write_text("")
    assert not kernel_cache.may_have_flashinfer_modules()
    (folder / "prefill.so").write_bytes(b"")
    assert kernel_cache.may_have_flashinfer_modules()


def test_packaged_kernels_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_cache._directories.append(tmp_path)
    monkeypatch.setattr(kernel_cache, "find_spec", lambda name: object())
    assert kernel_cache.may_have_flashinfer_modules()


@pytest.mark.parametrize("name", ["auto", "flashinfer", "flashinfer,triton", "torch"])
def test_nothing_is_imported_for_a_cpu(name: str) -> None:
    assert import_ahead(name, torch.device("cpu")) is None
