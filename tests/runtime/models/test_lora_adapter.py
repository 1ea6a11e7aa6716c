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
from skiff_runtime.kernels.lora_slots import HostBuffer, fill_slot
from skiff_runtime.layers.lora import LoraLayer, LoraState
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


def read(adapter: Path, layers: Layers) -> list[HostBuffer]:
    return read_adapter(adapter, layers, max_rank=RANK, base_names=frozenset())


def load(adapter: Path, layers: Layers) -> None:
    """Fill the only LoRA slot."""
    for buffer in read(adapter, layers):
        fill_slot(0, buffer, torch.empty(0), torch.float32)


def edit_tensors(adapter: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)


def test_matrices_are_loaded_with_the_scale(adapter: Path, layers: Layers) -> None:
    load(adapter, layers)
    stored = load_file(adapter / "adapter_model.safetensors")
    assert [layer.weights.ranks.tolist() for _, layer in layers[:4]] == [[4], [0], [0], [0]], (
        "nothing for o, gate and up, and down"
    )
    [q, k, v], weights = layers[0][1].b, layers[0][1].weights
    assert torch.equal(weights.a[0, 0, :4], stored[Q.format("A")])
    assert torch.equal(q.memory[0, :, :4], stored[Q.format("B")] * 1.5)
    assert torch.equal(v.memory[0, :, :4], stored[Q.replace("q_proj", "v_proj").format("B")] * 1.5)
    assert not k.memory[0, :, :4].any()


def test_adapter_replaces_all_of_the_one_before(
    adapter: Path, model: Path, layers: Layers, tmp_path: Path
) -> None:
    """Also what it has nothing for: a layer, a module of a layer, and columns beyond a module's own rank."""
    before = make_adapter(
        tmp_path / "before", model, seed=3, modules=("q_proj", "k_proj", "v_proj", "o_proj"), r=8
    )
    load(before, layers)
    assert layers[1][1].weights.ranks.tolist() == [8]
    edit_json(adapter / "adapter_config.json", rank_pattern={"v_proj": 2})
    edit_tensors(
        adapter,
        lambda tensors: tensors.update(
            {
                name: (each[:2] if ".lora_A." in name else each[:, :2]).contiguous()
                for name, each in tensors.items()
                if "v_proj" in name
            }
        ),
    )
    load(adapter, layers)
    assert [layer.weights.ranks.tolist() for _, layer in layers[:2]] == [[4], [0]]
    _, k, v = layers[0][1].b
    assert not k.memory[0, :, :4].any()
    assert v.memory[0, :, :2].all() and not v.memory[0, :, 2:4].any()
    _, k, v = layers[0][1].a
    assert not k.memory[0, :4].any()
    assert v.memory[0, :2].all() and not v.memory[0, 2:4].any()


def test_matrices_of_several_types_are_read_from_one_file(adapter: Path, layers: Layers) -> None:
    types = (torch.bfloat16, torch.float16, torch.float32)

    def convert(tensors: dict[str, torch.Tensor]) -> None:
        for number, name in enumerate(sorted(tensors)):
            tensors[name] = tensors[name].to(types[number % len(types)])

    edit_tensors(adapter, convert)
    stored = load_file(adapter / "adapter_model.safetensors")
    assert {each.dtype for each in stored.values()} == set(types)
    load(adapter, layers)
    for prefix, layer in layers:
        for module, a, b in zip(layer.modules, layer.a, layer.b, strict=True):
            name = f"base_model.model.{prefix}{module.name}.lora_{{}}.weight"
            if name.format("A") in stored:
                assert torch.equal(a.memory[0, :4], stored[name.format("A")].float())
                assert torch.equal(b.memory[0, :, :4], stored[name.format("B")].float() * 1.5)


def test_value_that_overflows_in_the_type_of_the_model_is_refused(model: Path, adapter: Path) -> None:
    state = LoraState(CPU, max_loras=1, max_rank=RANK, max_tokens=8)
    context = LayerContext(torch.float16, CPU, lora=state)
    layers = list(build_model(read_model_config(model), context, max_positions=8).lora_layers())
    edit_tensors(adapter, lambda tensors: tensors[Q.format("B")].fill_(60_000.0))
    with pytest.raises(ModelError, match=r"q_proj.*not finite as torch\.float16"):
        read(adapter, layers)


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
        ({"lora_alpha": 1e40}, "_proj' .* not finite"),
        ({"lora_alpha": 1e300}, "_proj' .* not finite"),
        ({"rank_pattern": {f"m{n}": 4 for n in range(5000)}}, "'rank_pattern' has more than 4096 entries"),
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
        (lambda t: t.update({Q.format("A"): torch.full((4, 64), torch.nan)}), "q_proj' .* not finite"),
        (lambda t: t.update({Q.format("A"): torch.full((4, 64), -torch.inf)}), "q_proj' .* not finite"),
        (lambda t: t.update({Q.format("B"): torch.full((64, 4), 3e38)}), "q_proj' .* not finite"),
        (lambda t: t.update({Q.format("A").removeprefix("base_model.model."): torch.zeros(4, 64)}), "twice"),
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
    ids=[
        "pair",
        "inputs",
        "outputs",
        "dtype",
        "nan",
        "inf",
        "scale",
        "twice",
        "head",
        "layer",
        "experts",
        "empty",
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    adapter: Path, layers: Layers, edit: Callable[[dict[str, torch.Tensor]], object], reason: str
) -> None:
    edit_tensors(adapter, edit)
    with pytest.raises(ModelError, match=reason):
        read(adapter, layers)


def test_files_that_are_missing_or_damaged_are_refused_by_name(adapter: Path, layers: Layers) -> None:
    weights = adapter / "adapter_model.safetensors"
    content = weights.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length].ljust((16 << 20) + 8)
    weights.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])
    with pytest.raises(ModelError, match="lists its tensors in 16777224 bytes"):
        read(adapter, layers)
    for damaged in (content[:-8], b"version https://git-lfs.github.com/spec/v1\n", b"short"):
        weights.write_bytes(damaged)
        with pytest.raises(ModelError, match="truncated or corrupt"):
            read(adapter, layers)
    weights.write_bytes(content[:-8])
    with pytest.raises(ModelError, match="truncated or corrupt"):
        read(adapter, layers)
    weights.rename(adapter / "adapter_model.bin")
    with pytest.raises(ModelError, match=r"lacks adapter_model\.safetensors"):
        read(adapter, layers)
    (adapter / "adapter_config.json").write_text(" " * (2 << 20))
    with pytest.raises(ModelError, match="larger than 1 MiB"):
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
