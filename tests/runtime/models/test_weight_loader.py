"""Loading weights: each file fault is one clear error that names file and tensor."""

import json
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
from skiff_runtime.models.checkpoint import INDEX_FILE, SINGLE_FILE
from skiff_runtime.models.config import FAMILIES, read_model_config
from skiff_runtime.models.decoder import DecoderModel
from skiff_runtime.models.registry import MODELS
from skiff_runtime.models.registry import make_model as build
from skiff_runtime.models.weight_loader import load_weights, weight_bytes

DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return make_model(tmp_path, "qwen2")


@pytest.fixture
def single(tmp_path: Path) -> Path:
    return make_model(tmp_path, "qwen2", shard_size="1GB")


def load(
    path: Path, *, load_format: str = "safetensors", rank: int = 0, size: int = 1
) -> tuple[DecoderModel, list[float]]:
    placement = LayerContext(torch.float32, torch.device("cpu"), TensorParallelGroup(rank, size))
    model = build(read_model_config(path), placement, max_positions=8)
    shares: list[float] = []
    load_weights(model, load_format, shares.append)
    return model, shares


def rewrite(file: Path, **changes: torch.Tensor | None) -> None:
    """Replace or (None) drop tensors of a safetensors file; ``__`` stands for a dot."""
    tensors = load_file(file)
    for key, value in changes.items():
        name = key.replace("__", ".")
        tensors.pop(name)
        if value is not None:
            tensors[name] = value
    save_file(tensors, file)


def shard_of(path: Path, tensor: str) -> Path:
    return path / str(json.loads((path / INDEX_FILE).read_text())["weight_map"][tensor])


def test_known_architectures_are_those_of_the_configuration() -> None:
    assert sorted(MODELS) == sorted(FAMILIES)


def test_all_bytes_are_read_and_progress_ends_at_one(sharded: Path) -> None:
    model, shares = load(sharded)
    assert shares == sorted(set(shares))
    assert shares[-1] == 1.0
    tensors: dict[str, torch.Tensor] = {}
    for file in sharded.glob("*.safetensors"):
        tensors.update(load_file(file))
    assert {piece.name for piece in model.pieces()} == set(tensors)
    assert weight_bytes(model) == sum(tensor.nbytes for tensor in tensors.values())
    for piece in model.pieces():
        assert torch.equal(piece.target, tensors[piece.name])


@pytest.mark.parametrize("size", [2, 4])
def test_parts_of_all_ranks_cover_every_tensor(sharded: Path, size: int) -> None:
    whole = {piece.name: piece.target for piece in load(sharded)[0].pieces()}
    seen = {name: torch.zeros(tensor.shape, dtype=torch.bool) for name, tensor in whole.items()}
    for rank in range(size):
        for piece in load(sharded, rank=rank, size=size)[0].pieces():
            part = slice(piece.start, piece.stop)
            index: Any = part if piece.dim == 0 else (slice(None), part)
            assert torch.equal(piece.target, whole[piece.name][index])
            seen[piece.name][index] = True
    assert all(mask.all() for mask in seen.values())


def test_more_ranks_than_kv_heads_share_them(sharded: Path) -> None:
    parts = []
    for rank in range(4):
        pieces = {piece.name: piece for piece in load(sharded, rank=rank, size=4)[0].pieces()}
        parts.append((pieces["model.layers.0.self_attn.k_proj.weight"].start, pieces[DOWN].start))
    assert parts == [(0, 0), (0, 24), (16, 48), (16, 72)]


def test_one_file_without_an_index(single: Path) -> None:
    assert not (single / INDEX_FILE).exists()
    assert load(single)[1][-1] == 1.0


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, 0.99])
def test_truncated_file(single: Path, keep: float) -> None:
    file = single / SINGLE_FILE
    data = file.read_bytes()
    file.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    with pytest.raises(ModelError, match=r"model\.safetensors is truncated or corrupt"):
        load(single)


def test_corrupt_header(single: Path) -> None:
    file = single / SINGLE_FILE
    data = bytearray(file.read_bytes())
    data[8:40] = b"\xff" * 32
    file.write_bytes(data)
    with pytest.raises(ModelError, match="truncated or corrupt"):
        load(single)


def test_missing_shard(sharded: Path) -> None:
    file = shard_of(sharded, DOWN)
    file.unlink()
    with pytest.raises(ModelError, match=f"{file.name} is missing"):
        load(sharded)


def test_missing_tensor(sharded: Path) -> None:
    file = shard_of(sharded, DOWN)
    rewrite(file, **{DOWN.replace(".", "__"): None})
    with pytest.raises(ModelError, match=f"{file.name} lacks the tensor '{DOWN}'"):
        load(sharded)


def test_tensor_missing_from_the_index(sharded: Path) -> None:
    files = json.loads((sharded / INDEX_FILE).read_text())["weight_map"]
    del files[DOWN]
    edit_json(sharded / INDEX_FILE, weight_map=files)
    with pytest.raises(ModelError, match=f"no weights file holds the tensor '{DOWN}'"):
        load(sharded)


@pytest.mark.parametrize("weights", [["x"], {"a": 1}, None, {"a": "../outside.safetensors"}])
def test_malformed_index(sharded: Path, weights: Any) -> None:
    edit_json(sharded / INDEX_FILE, weight_map=weights)
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json"):
        load(sharded)


def test_wrong_shape(sharded: Path) -> None:
    rewrite(shard_of(sharded, DOWN), **{DOWN.replace(".", "__"): torch.zeros(64, 95)})
    with pytest.raises(
        ModelError, match=rf"'{DOWN}' has shape \[64, 95\], but config.json makes it \[64, 96\]"
    ):
        load(sharded)


def test_wrong_type(sharded: Path) -> None:
    integers = torch.zeros(64, 96, dtype=torch.int8)
    rewrite(shard_of(sharded, DOWN), **{DOWN.replace(".", "__"): integers})
    with pytest.raises(ModelError, match=f"'{DOWN}' is of type I8"):
        load(sharded)


def test_no_weights_at_all(single: Path) -> None:
    (single / SINGLE_FILE).unlink()
    with pytest.raises(ModelError, match="holds no weights"):
        load(single)


def test_dummy_weights_need_no_file_and_are_the_same_each_time(single: Path) -> None:
    (single / SINGLE_FILE).unlink()
    prompts = [[5, 6, 7], [8] * 20]
    outputs = []
    for _ in range(2):
        engine = make_engine(single, load_format="dummy", page_size=16)
        outputs.append(generate(engine, prompts, 6, page_size=16, budget=64, slots=2))
        engine.close()
    assert outputs[0] == outputs[1]


def test_dummy_copies_on_several_ranks_agree(sharded: Path) -> None:
    by_rank = [
        {piece.name: piece for piece in load(sharded, load_format="dummy", rank=rank, size=4)[0].pieces()}
        for rank in (0, 1)
    ]
    key, query = (f"model.layers.0.self_attn.{kind}_proj.weight" for kind in "kq")
    assert torch.equal(by_rank[0][key].target, by_rank[1][key].target)
    assert not torch.equal(by_rank[0][query].target, by_rank[1][query].target)
