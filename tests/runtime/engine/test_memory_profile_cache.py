"""The memory profile cache: what is found again, what is not, and files that are damaged."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
from tiny_config import write_config

from skiff_runtime.config import Config
from skiff_runtime.engine import memory_profile_cache
from skiff_runtime.engine.graph_memory import GraphMemory, MemoryProfile
from skiff_runtime.engine.memory_profile_cache import (
    FOLDER,
    MAX_ENTRIES,
    MAX_ENTRY_BYTES,
    MemoryProfileCache,
    encode_key,
)
from skiff_runtime.models.config import ModelConfig, read_model_config

GIB: Final = 1 << 30
PROFILE: Final = MemoryProfile(3 * GIB, GraphMemory(0, GIB, 1 << 20, 23), GraphMemory(0, GIB, 2 << 20, 29), 7)
GPU: Final[dict[str, Any]] = {"name": "NVIDIA H200", "total_memory": 141 * GIB, "driver": "580.1"}


def make_cache(folder: Path, key: str = "key") -> MemoryProfileCache:
    return MemoryProfileCache(folder, key, max_bytes=80 * GIB)


@pytest.fixture
def model(tmp_path: Path) -> ModelConfig:
    write_config(tmp_path)
    return read_model_config(tmp_path)


def test_profile_is_found_again_for_its_key_alone(tmp_path: Path) -> None:
    assert make_cache(tmp_path).load() is None
    make_cache(tmp_path).store(PROFILE)
    assert make_cache(tmp_path).load() == PROFILE
    assert make_cache(tmp_path, "other").load() is None
    make_cache(tmp_path).remove()
    make_cache(tmp_path).remove()
    assert make_cache(tmp_path).load() is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff" * 100,
        b"null",
        json.dumps({"key": "key"}).encode(),
        json.dumps({"key": "key", "profile": {"activations": "many"}}).encode(),
        b" " * (MAX_ENTRY_BYTES + 1),
    ],
    ids=["empty", "cut", "binary", "null", "no profile", "wrong type", "too large"],
)
def test_damaged_file_counts_as_absent_and_is_replaced(tmp_path: Path, content: bytes) -> None:
    cache = make_cache(tmp_path)
    cache.store(PROFILE)
    cache.path.write_bytes(content)
    assert cache.load() is None
    cache.store(PROFILE)
    assert cache.load() == PROFILE


def test_file_of_another_start_counts_as_absent(tmp_path: Path) -> None:
    """Two keys may have the same hash, or a file may have been copied by hand."""
    cache, other = make_cache(tmp_path), make_cache(tmp_path, "other")
    other.store(PROFILE)
    other.path.rename(cache.path)
    assert cache.load() is None


@pytest.mark.parametrize(
    "wrong",
    [
        MemoryProfile(-1, PROFILE.decode_graphs, PROFILE.prefill_graphs, 0),
        MemoryProfile(81 * GIB, PROFILE.decode_graphs, PROFILE.prefill_graphs, 0),
        MemoryProfile(0, GraphMemory(0, 0, GIB, 1 << 20), PROFILE.prefill_graphs, 0),
        MemoryProfile(0, PROFILE.decode_graphs, GraphMemory(0, 0, -1, 2), 0),
    ],
)
def test_impossible_profile_counts_as_absent(tmp_path: Path, wrong: MemoryProfile) -> None:
    cache = make_cache(tmp_path)
    cache.store(wrong)
    assert cache.path.exists()
    assert cache.load() is None


def test_directory_that_cannot_be_written_to_is_no_error(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("a file where the folder should be")
    cache = make_cache(tmp_path)
    cache.store(PROFILE)
    assert cache.load() is None
    cache.remove()


def test_failed_write_leaves_the_old_entry_and_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = make_cache(tmp_path)
    cache.store(PROFILE)

    def fail(self: Path, data: bytes) -> int:
        with self.open("wb") as file:
            file.write(data[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fail)
    cache.store(MemoryProfile(1, PROFILE.decode_graphs, PROFILE.prefill_graphs, 1))
    assert cache.load() == PROFILE
    assert list((tmp_path / FOLDER).iterdir()) == [cache.path]


def test_number_of_entries_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_profile_cache, "MAX_ENTRIES", 3)
    assert MAX_ENTRIES > 3
    for number in range(6):
        make_cache(tmp_path, f"key {number}").store(PROFILE)
    assert len(list((tmp_path / FOLDER).iterdir())) == 3
    assert make_cache(tmp_path, "key 5").load() == PROFILE


def test_key_is_deterministic_and_ignores_the_server_and_names(model: ModelConfig, tmp_path: Path) -> None:
    config = Config(model="a", device="cuda")
    key = encode(config, model)
    same = replace(
        config,
        model="b",
        port=9000,
        served_model_name="c",
        kernel_cache_dir="d",
        log_level="debug",
        disable_deferred_graph_capture=True,
    )
    assert encode(same, replace(model, path=tmp_path / "elsewhere", tokenizer_path=tmp_path)) == key
    assert json.loads(key)["model"]["hidden_size"] == model.hidden_size


@pytest.mark.parametrize(
    "changes",
    [
        {"tp_size": 2},
        {"max_num_batched_tokens": 4096},
        {"max_running_requests": 65},
        {"quantization": "fp8"},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"disable_cascade_attn": True},
        {"dtype": "float16"},
        {"max_model_len": 100},
        {"expert_parallel": True},
        {"all_reduce": "nccl"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_every_option_of_the_engine_is_part_of_the_key(model: ModelConfig, changes: dict[str, Any]) -> None:
    config = Config(model="a", device="cuda")
    assert encode(replace(config, **changes), model) != encode(config, model)


def test_model_rank_backend_gpu_and_environment_are_part_of_the_key(
    model: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(model="a", device="cuda")
    keys = [
        encode(config, model),
        encode(config, replace(model, num_layers=3)),
        encode(config, model, tp_rank=1),
        encode(config, model, backend="FlashInferPrefill,TritonDecode"),
        encode(config, model, gpu={**GPU, "total_memory": 80 * GIB}),
        encode(config, model, gpu={**GPU, "driver": "590.2"}),
    ]
    monkeypatch.setattr(memory_profile_cache, "__version__", "99")
    keys.append(encode(config, model))
    monkeypatch.setattr(memory_profile_cache, "version", lambda package: f"{package} 99")
    keys.append(encode(config, model))
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    keys.append(encode(config, model))
    assert len(dict.fromkeys(keys)) == len(keys)


def encode(
    config: Config,
    model: ModelConfig,
    *,
    tp_rank: int = 0,
    backend: str = "TritonPrefill,TritonDecode",
    gpu: dict[str, Any] = GPU,
) -> str:
    return encode_key(config, model, tp_rank=tp_rank, backend=backend, gpu=gpu)
