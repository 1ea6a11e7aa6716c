"""The prefetch of a checkpoint: its files, its limits, and that it begins before torch is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from skiff_runtime.models.checkpoint_files import INDEX_FILE, SINGLE_FILE, list_weight_files
from skiff_runtime.worker import checkpoint_prefetch
from skiff_runtime.worker.checkpoint_prefetch import prefetch_checkpoint, request_files

MIB = 1 << 20


def write_sharded(directory: Path, names: list[str]) -> None:
    entries = ", ".join(f'"tensor{at}": "{name}"' for at, name in enumerate(names))
    (directory / INDEX_FILE).write_text(f'{{"weight_map": {{{entries}}}}}')
    for name in names:
        (directory / name).write_bytes(os.urandom(MIB))


def test_files_of_the_index_are_found_by_name_and_others_are_not(tmp_path: Path) -> None:
    write_sharded(tmp_path, ["b.safetensors", "a.safetensors", "b.safetensors"])
    (tmp_path / "consolidated.safetensors").write_bytes(b"the same weights again")
    assert [file.name for file in list_weight_files(tmp_path)] == ["a.safetensors", "b.safetensors"]


def test_single_file_and_no_file(tmp_path: Path) -> None:
    assert list_weight_files(tmp_path) == []
    (tmp_path / SINGLE_FILE).write_bytes(b"weights")
    assert list_weight_files(tmp_path) == [tmp_path / SINGLE_FILE]


@pytest.mark.parametrize(
    ("limit", "expected"), [(10 * MIB, 2 * MIB + MIB // 2), (MIB + 5, MIB + 5), (MIB, MIB), (0, 0)]
)
def test_no_more_than_the_limit_is_requested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, expected: int
) -> None:
    requested: list[tuple[int, int, int]] = []
    monkeypatch.setattr(checkpoint_prefetch, "RANGE_BYTES", 300_000)
    monkeypatch.setattr(os, "posix_fadvise", lambda _, *request: requested.append(request))
    files = [tmp_path / "a", tmp_path / "missing", tmp_path / "b"]
    files[0].write_bytes(bytes(MIB))
    files[2].write_bytes(bytes(MIB + MIB // 2))
    assert request_files(files, limit) == expected
    assert sum(count for _, count, _ in requested) == expected
    assert all(0 < count <= 300_000 and advice == os.POSIX_FADV_WILLNEED for _, count, advice in requested)


def test_ranks_divide_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"{at}.safetensors" for at in range(5)]
    write_sharded(tmp_path, names)
    shares: list[list[str]] = []
    monkeypatch.setattr(
        checkpoint_prefetch,
        "request_files",
        lambda files, limit: shares.append([file.name for file in files]),
    )
    for rank in range(3):
        prefetch_checkpoint(tmp_path, tp_rank=rank, tp_size=3).join(30)
    assert sorted(name for share in shares for name in share) == names
    assert [len(share) for share in shares] == [2, 2, 1]


def test_broken_index_is_left_to_the_loader(tmp_path: Path) -> None:
    (tmp_path / INDEX_FILE).write_text("{")
    thread = prefetch_checkpoint(tmp_path, tp_rank=0, tp_size=1)
    thread.join(30)
    assert not thread.is_alive()


def test_it_begins_before_torch_is_imported() -> None:
    code = (
        "import sys, skiff_runtime.worker.rank_start; print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split()[0] == "False"
