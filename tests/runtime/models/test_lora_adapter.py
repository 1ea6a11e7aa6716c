"""Files of LoRA adapters: what is read, and what is refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_models import make_adapter
from safetensors.torch import load_file, save_file
from tiny_models import edit_json, make_model

from skiff_runtime.errors import ModelError
from skiff_runtime.layers.lora import LoraLayer, LoraState, PackedLora
from skiff_runtime.layers.sharding import LayerContext
from skiff_runtime.models.config import read_model_config
from skiff_runtime.models.lora_adapter import read_adapter, read_adapter_config
from skiff_runtime.models.registry import make_model as build_model

CPU = torch.device("cpu")
RANK = 8
Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
Layers = list[tuple[str, LoraLayer]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "llama", seed=1)


@pytest.fixture(scope="module")
def layers(model: Path) -> Layers:
    state = LoraState(CPU, max_loras=1, max_rank=RANK, max_tokens=8)
    context = LayerContext(torch.float32, CPU, lora=state)
    return list(build_model(read_model_config(model), context, max_positions=8).lora_layers())


@pytest.fixture
def adapter(model: Path, tmp_path: Path) -> Path:
    return make_adapter(tmp_path, model, seed=2, modules=("q_proj", "v_proj"), r=4, lora_alpha=6)


def read(adapter: Path, layers: Layers) -> list[PackedLora | None]:
    return read_adapter(adapter, layers, max_rank=RANK, base_names=frozenset())


def edit_tensors(adapter: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)


def test_matrices_are_packed_with_the_scale_and_zeros_beyond_the_rank(adapter: Path, layers: Layers) -> None:
    packed = read(adapter, layers)
    stored = load_file(adapter / "adapter_model.safetensors")
    first, others = packed[0], packed[1:4]
    assert first is not None and first.rank == 4
    assert all(each is None for each in others), "o, gate and up, down of the first layer"
    q_outputs = stored[Q.format("B")].shape[0]
    assert torch.equal(first.a[0, :4], stored[Q.format("A")])
    assert torch.equal(first.b[:q_outputs, :4], stored[Q.format("B")] * 1.5)
    k_outputs = layers[0][1].weights.part_sizes[1]
    assert not first.a[1].any() and not first.b[q_outputs : q_outputs + k_outputs].any()
    assert not first.a[:, 4:].any() and not first.b[:, 4:].any()


def test_unloaded_layer_keeps_nothing_of_the_adapter_before(adapter: Path, layers: Layers) -> None:
    layer, [packed, *_] = layers[0][1], read(adapter, layers)
    layer.load(0, packed)
    assert layer.weights.ranks.tolist() == [4] and layer.weights.b.any()
    layer.load(0, None)
    assert layer.weights.ranks.tolist() == [0] and not layer.weights.a.any() and not layer.weights.b.any()


@pytest.mark.parametrize(
    ("changes", "module", "scale"),
    [
        ({}, "model.layers.0.self_attn.q_proj", 6 / 4),
        ({"use_rslora": True}, "model.layers.0.self_attn.q_proj", 6 / 2),
        ({"alpha_pattern": {"q_proj": 2}}, "model.layers.0.self_attn.q_proj", 2 / 4),
        ({"alpha_pattern": {"q_proj": 2}}, "model.layers.0.self_attn.v_proj", 6 / 4),
        ({"rank_pattern": {"layers.1.self_attn.q_proj": 2}}, "model.layers.0.self_attn.q_proj", 6 / 4),
        ({"rank_pattern": {"layers.1.self_attn.q_proj": 2}}, "model.layers.1.self_attn.q_proj", 6 / 2),
        ({"rank_pattern": {"^model.layers.1.self_attn.q_proj": 2}}, "model.layers.1.self_attn.q_proj", 3),
        ({"rank_pattern": {"^q_proj": 2}}, "model.layers.1.self_attn.q_proj", 6 / 4),
        ({"rank_pattern": {"proj": 2}}, "model.layers.1.self_attn.q_proj", 6 / 4),
    ],
)
def test_scale_of_a_module(adapter: Path, changes: dict[str, Any], module: str, scale: float) -> None:
    edit_json(adapter / "adapter_config.json", **changes)
    assert read_adapter_config(adapter).scale_of(module) == pytest.approx(scale)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"peft_type": "IA3"}, "'peft_type' is 'IA3'"),
        ({"use_dora": True}, "'use_dora' is set"),
        ({"bias": "all"}, "'bias' is 'all'"),
        ({"lora_bias": True}, "'lora_bias' is set"),
        ({"modules_to_save": ["lm_head"]}, "'modules_to_save' is set"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "'target_parameters' is set"),
        ({"target_modules": ["q_proj", "lm_head"]}, "'target_modules' contains 'lm_head'"),
        ({"target_modules": ["embed_tokens"]}, "'target_modules' contains 'embed_tokens'"),
        ({"init_lora_weights": "pissa_niter_4"}, "'init_lora_weights' is 'pissa_niter_4'"),
        ({"rank_pattern": {"(a+)+b": 4}}, "'rank_pattern' contains the regular expression"),
        ({"rank_pattern": {"q_proj": 0}}, "'q_proj' must be a positive whole number"),
        ({"alpha_pattern": {"q_proj": "2"}}, "'q_proj' must be a number"),
        ({"r": ...}, "lacks 'r'"),
        ({"lora_alpha": ...}, "lacks 'lora_alpha'"),
        ({"r": 16}, "has rank 16, but --max-lora-rank is 8"),
        ({"r": 5}, "has shape .4, 64., but this model and rank 5 need"),
    ],
)
def test_unsupported_configurations_are_refused_by_name(
    adapter: Path, layers: Layers, changes: dict[str, Any], reason: str
) -> None:
    edit_json(adapter / "adapter_config.json", **changes)
    with pytest.raises(ModelError, match=reason):
        read(adapter, layers)


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda t: t.pop(Q.format("A")), "lacks the matrix lora_A of 'model.layers.0.self_attn.q_proj'"),
        (lambda t: t.update({Q.format("A"): torch.zeros(4, 63)}), "lora_A of .* has shape .4, 63."),
        (lambda t: t.update({Q.format("B"): torch.zeros(32, 4)}), "lora_B of .* has shape .32, 4."),
        (lambda t: t.update({Q.format("A"): torch.zeros(4, 64, dtype=torch.int32)}), "is of type I32"),
        (lambda t: t.update({Q.format("A"): torch.full((4, 64), torch.nan)}), "not finite"),
        (lambda t: t.update({"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 64)}), "output head"),
        (
            lambda t: t.update({Q.format("A").replace("layers.0", "layers.9"): torch.zeros(4, 64)}),
            "is no LoRA matrix of a module of this model",
        ),
        (
            lambda t: t.update(
                {"base_model.model.model.layers.0.mlp.experts.3.up_proj.lora_A.weight": torch.zeros(4, 64)}
            ),
            "adapts experts",
        ),
        (lambda t: t.clear(), "contains no tensor"),
    ],
    ids=["pair", "inputs", "outputs", "dtype", "nan", "head", "layer", "experts", "empty"],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    adapter: Path, layers: Layers, edit: Callable[[dict[str, torch.Tensor]], object], reason: str
) -> None:
    edit_tensors(adapter, edit)
    with pytest.raises(ModelError, match=reason):
        read(adapter, layers)


def test_files_that_are_missing_or_damaged_are_refused_by_name(adapter: Path, layers: Layers) -> None:
    weights = adapter / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(ModelError, match="truncated or corrupt"):
        read(adapter, layers)
    weights.rename(adapter / "adapter_model.bin")
    with pytest.raises(ModelError, match=r"lacks adapter_model\.safetensors"):
        read(adapter, layers)
    (adapter / "adapter_config.json").write_text(json.dumps([]))
    with pytest.raises(ModelError, match="must contain a JSON object"):
        read(adapter, layers)


def test_another_base_is_only_a_warning(
    adapter: Path, layers: Layers, caplog: pytest.LogCaptureFixture
) -> None:
    edit_json(adapter / "adapter_config.json", base_model_name_or_path="org/Other-7B")
    read_adapter(adapter, layers, max_rank=RANK, base_names=frozenset(["Other-7B"]))
    assert "adapter_base_differs" not in caplog.text
    read(adapter, layers)
    assert "adapter_base_differs" in caplog.text
