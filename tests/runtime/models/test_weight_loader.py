"""Weight loading: every fault of a file is one clear error that names the file and the tensor."""

import itertools
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import generate, make_engine
from safetensors.torch import load_file, save_file
from tiny_models import edit_json, make_model

from skiff_runtime.distributed.tensor_parallel import TensorParallelGroup
from skiff_runtime.errors import ModelError
from skiff_runtime.layers.sharding import LayerContext
from skiff_runtime.models import weight_loader
from skiff_runtime.models.checkpoint_files import INDEX_FILE, SINGLE_FILE
from skiff_runtime.models.config import ARCHITECTURES, read_model_config
from skiff_runtime.models.decoder import DecoderModel
from skiff_runtime.models.registry import MODELS
from skiff_runtime.models.registry import make_model as build
from skiff_runtime.models.tensor_file import TensorFile
from skiff_runtime.models.weight_loader import load_weights

DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return make_model(tmp_path, "qwen2")


@pytest.fixture
def single(tmp_path: Path) -> Path:
    return make_model(tmp_path, "qwen2", shard_size="1GB")


def load(
    path: Path, *, load_format: str = "safetensors", tp_rank: int = 0, tp_size: int = 1
) -> tuple[DecoderModel, list[float]]:
    context = LayerContext(torch.float32, torch.device("cpu"), TensorParallelGroup(tp_rank, tp_size))
    model = build(read_model_config(path), context, max_positions=8)
    progress: list[float] = []
    load_weights(model, load_format, progress.append)
    return model, progress


def rewrite(file: Path, **changes: torch.Tensor | None) -> None:
    """Replace or (None) drop tensors of a safetensors file; ``__`` stands for a dot."""
    tensors = load_file(file)
    for key, value in changes.items():
        name = key.replace("__", ".")
        tensors.pop(name)
        if value is not None:
            tensors[name] = value
    save_file(tensors, file)


def file_of(path: Path, tensor: str) -> Path:
    return path / str(json.loads((path / INDEX_FILE).read_text())["weight_map"][tensor])


def test_every_configured_architecture_has_a_model_class() -> None:
    assert sorted(MODELS) == sorted(ARCHITECTURES)


def test_all_bytes_are_read_and_progress_ends_at_one(sharded: Path) -> None:
    model, progress = load(sharded)
    assert progress == sorted(set(progress))
    assert progress[-1] == 1.0
    tensors: dict[str, torch.Tensor] = {}
    for file in sharded.glob("*.safetensors"):
        tensors.update(load_file(file))
    assert {shard.name for shard in model.weight_shards()} == set(tensors)
    assert model.weight_bytes() == sum(tensor.nbytes for tensor in tensors.values())
    for shard in model.weight_shards():
        assert torch.equal(shard.target, tensors[shard.name])


def test_reads_overlap_on_one_cpu(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk needs several reads at a time to be fast, however few CPUs there are."""
    both, read = threading.Barrier(2), TensorFile.read
    first_reads = itertools.chain([True, True], itertools.repeat(False))

    def read_together(file: TensorFile, target: memoryview, offset: int) -> None:
        if threading.current_thread().name.startswith("weights") and next(first_reads):
            both.wait(30)
        read(file, target, offset)

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    monkeypatch.setattr(weight_loader, "BATCH_BYTES", 1)
    monkeypatch.setattr(TensorFile, "read", read_together)
    assert load(sharded)[1][-1] == 1.0


@pytest.mark.parametrize("tp_size", [2, 4])
def test_shards_of_all_ranks_cover_every_tensor(sharded: Path, tp_size: int) -> None:
    whole = {shard.name: shard.target for shard in load(sharded)[0].weight_shards()}
    seen = {name: torch.zeros(tensor.shape, dtype=torch.bool) for name, tensor in whole.items()}
    for rank in range(tp_size):
        for shard in load(sharded, tp_rank=rank, tp_size=tp_size)[0].weight_shards():
            part = slice(shard.start, shard.stop)
            index: Any = part if shard.dim == 0 else (slice(None), part)
            assert torch.equal(shard.target, whole[shard.name][index])
            seen[shard.name][index] = True
    assert all(mask.all() for mask in seen.values())


def test_kv_heads_are_replicated_over_more_ranks(sharded: Path) -> None:
    parts = []
    for rank in range(4):
        shards = {shard.name: shard for shard in load(sharded, tp_rank=rank, tp_size=4)[0].weight_shards()}
        parts.append((shards["model.layers.0.self_attn.k_proj.weight"].start, shards[DOWN].start))
    assert parts == [(0, 0), (0, 24), (16, 48), (16, 72)]


def test_single_file_needs_no_index(single: Path) -> None:
    assert not (single / INDEX_FILE).exists()
    assert load(single)[1][-1] == 1.0


def test_truncated_file_is_refused(single: Path) -> None:
    file = single / SINGLE_FILE
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    with pytest.raises(ModelError, match=r"model\.safetensors is truncated or corrupt"):
        load(single)


def test_missing_file_is_refused(sharded: Path) -> None:
    file = file_of(sharded, DOWN)
    file.unlink()
    with pytest.raises(ModelError, match=f"{file.name} is missing"):
        load(sharded)


def test_missing_tensor_is_refused(sharded: Path) -> None:
    file = file_of(sharded, DOWN)
    rewrite(file, **{DOWN.replace(".", "__"): None})
    with pytest.raises(ModelError, match=f"{file.name} lacks the tensor '{DOWN}'"):
        load(sharded)


def test_tensor_missing_from_the_index_is_refused(sharded: Path) -> None:
    files = json.loads((sharded / INDEX_FILE).read_text())["weight_map"]
    del files[DOWN]
    edit_json(sharded / INDEX_FILE, weight_map=files)
    with pytest.raises(ModelError, match=f"no weights file contains the tensor '{DOWN}'"):
        load(sharded)


@pytest.mark.parametrize("weights", [["x"], {"a": 1}, None, {"a": "../outside.safetensors"}])
def test_malformed_index_is_refused(sharded: Path, weights: Any) -> None:
    edit_json(sharded / INDEX_FILE, weight_map=weights)
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json"):
        load(sharded)


def test_wrong_shape_is_refused(sharded: Path) -> None:
    rewrite(file_of(sharded, DOWN), **{DOWN.replace(".", "__"): torch.zeros(64, 95)})
    with pytest.raises(
        ModelError, match=rf"'{DOWN}' has shape \[64, 95\], but config.json implies \[64, 96\]"
    ):
        load(sharded)


def test_wrong_dtype_is_refused(sharded: Path) -> None:
    integers = torch.zeros(64, 96, dtype=torch.int8)
    rewrite(file_of(sharded, DOWN), **{DOWN.replace(".", "__"): integers})
    with pytest.raises(ModelError, match=f"'{DOWN}' is of type I8"):
        load(sharded)


def test_directory_without_weights_is_refused(single: Path) -> None:
    (single / SINGLE_FILE).unlink()
    with pytest.raises(ModelError, match="contains no weights"):
        load(single)


def test_dummy_weights_need_no_file_and_are_reproducible(single: Path) -> None:
    (single / SINGLE_FILE).unlink()
    prompts = [[5, 6, 7], [8] * 20]
    outputs = []
    for _ in range(2):
        engine = make_engine(single, load_format="dummy", page_size=16)
        outputs.append(generate(engine, prompts, 6, page_size=16, budget=64, slots=2))
        engine.close()
    assert outputs[0] == outputs[1]


def test_dummy_replicas_agree_across_ranks(sharded: Path) -> None:
    by_rank = [
        {
            shard.name: shard
            for shard in load(sharded, load_format="dummy", tp_rank=rank, tp_size=4)[0].weight_shards()
        }
        for rank in (0, 1)
    ]
    key, query = (f"model.layers.0.self_attn.{kind}_proj.weight" for kind in "kq")
    assert torch.equal(by_rank[0][key].target, by_rank[1][key].target)
    assert not torch.equal(by_rank[0][query].target, by_rank[1][query].target)
