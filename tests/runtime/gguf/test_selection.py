"""The choice of a GGUF file in a directory, and by its quantization in a repository."""

from pathlib import Path

import pytest

from skiff_runtime.errors import ModelError
from skiff_runtime.gguf.selection import find_gguf, select_by_quant_type

NAMES = [
    "Qwen3-8B-Q4_K_M.gguf",
    "Qwen3-8B-UD-Q4_K_M.gguf",
    "Qwen3-8B-Q4_K_S.gguf",
    "Qwen3-8B.Q8_0.gguf",
    "README.md",
]


def test_the_only_gguf_file_of_a_directory_is_its_model(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    file.touch()
    (tmp_path / "config.json").touch()
    assert find_gguf(tmp_path) == file
    assert find_gguf(file) == file
    assert find_gguf(tmp_path / "absent") == tmp_path / "absent"


def test_safetensors_win_over_gguf_files(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf", "model.safetensors"):
        (tmp_path / name).touch()
    assert find_gguf(tmp_path) == tmp_path


def test_several_files_are_refused_with_their_names(tmp_path: Path) -> None:
    for name in ("b.gguf", "a.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ModelError, match=r"holds 2 GGUF files; --model takes one of them: a\.gguf, b\.gguf"):
        find_gguf(tmp_path)


@pytest.mark.parametrize(
    ("quant_type", "found"),
    [
        ("Q4_K_M", ["Qwen3-8B-Q4_K_M.gguf"]),
        ("q4_k_m", ["Qwen3-8B-Q4_K_M.gguf"]),
        ("UD-Q4_K_M", ["Qwen3-8B-UD-Q4_K_M.gguf"]),
        ("Q8_0", ["Qwen3-8B.Q8_0.gguf"]),
        ("K_M", []),
        ("Q5_K_M", []),
        ("", NAMES[:-1]),
    ],
)
def test_file_is_selected_by_its_quantization(quant_type: str, found: list[str]) -> None:
    assert select_by_quant_type(NAMES, quant_type) == found


@pytest.mark.parametrize(
    "names",
    [
        ["a-Q8_0.gguf", "b-Q8_0.gguf"],
        ["llama-13b-Q8_0.gguf", "llama-7b-Q8_0.gguf"],
        ["Qwen3-VL-8B-Q8_0.gguf", "mmproj-Q8_0.gguf"],
        ["Qwen3-8B-Instruct-Q8_0.gguf", "Qwen3-8B-Q8_0.gguf"],
        ["Q8_0.gguf", "b-Q8_0.gguf"],
    ],
)
def test_different_models_stay_ambiguous(names: list[str]) -> None:
    assert select_by_quant_type(names, "Q8_0") == names
