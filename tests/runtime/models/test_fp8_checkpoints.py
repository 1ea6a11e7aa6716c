"""FP8 checkpoints: supported ones are loaded without another quantization, others are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_checkpoints import (
    COMPRESSED,
    FBGEMM,
    GROUP,
    PROMPTS,
    SCHEME,
    generate_greedy,
    quantize,
    quantize_linear_layers,
)
from tiny_models import edit_json, load_reference, make_model, oracle_choices

from skiff_runtime.config import Config, Quantization
from skiff_runtime.distributed.tensor_parallel import TensorParallelGroup
from skiff_runtime.errors import ConfigError, ModelError
from skiff_runtime.layers.projections import PACKED_MODULES
from skiff_runtime.layers.sharding import LayerContext, WeightShard
from skiff_runtime.models.checkpoint_files import INDEX_FILE
from skiff_runtime.models.config import ModelConfig, read_model_config
from skiff_runtime.models.footprint import estimate_weight_bytes
from skiff_runtime.models.registry import make_model as build
from skiff_runtime.models.weight_loader import load_weights
from skiff_runtime.processes.resolve import resolve

ATTENTION = [f"self_attn.{name}_proj" for name in "qkvo"]
FEED_FORWARD = [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
UNQUANTIZED = [
    *(f"model.layers.0.{name}" for name in (*ATTENTION, *FEED_FORWARD)),
    *(f"model.layers.1.{name}" for name in ATTENTION[:3]),
    "model.layers.2.mlp.down_proj",
]
"""A whole layer, a projection after a norm, which then must not quantize, and one after an activation, likewise."""
SPELLINGS = {
    "names": UNQUANTIZED,
    "modules": ["model.layers.0", *UNQUANTIZED[7:10], "2.mlp.down_proj"],
    "expressions": [
        r"re:model\.layers\.0\..*",
        r"re:.*\.1\.self_attn\.[qkv]_proj$",
        "model.layers.2.mlp.d.*",
    ],
}
"""The same modules in every spelling that a checkpoint may use."""


def load(path: Path, *, quantized: bool = True, tp_rank: int = 0, tp_size: int = 1) -> dict[str, WeightShard]:
    """Load a rank's model, and return its weight shards by name."""
    group = TensorParallelGroup(tp_rank, tp_size)
    config = read_model_config(path)
    kind: Quantization = "fp8" if quantized else "none"
    context = LayerContext(
        torch.float32,
        torch.device("cpu"),
        group,
        kind,
        unquantized=config.unquantized,
        stored_format=config.weight_format,
    )
    model = build(config, context, max_positions=8)
    load_weights(model, "safetensors", lambda share: None)
    return {shard.name: shard for shard in model.weight_shards()}


@pytest.mark.parametrize("config", [COMPRESSED, FBGEMM], ids=["compressed-tensors", "fbgemm"])
@pytest.mark.parametrize("shape", [(-1, 1), (-1,)], ids=["column", "flat"])
def test_quantized_checkpoint_is_loaded_unchanged(
    tmp_path: Path, config: dict[str, Any], shape: tuple[int, ...]
) -> None:
    plain, ready = (make_model(tmp_path / name, "qwen2") for name in ("plain", "ready"))
    quantize(ready, config, shape)
    assert resolve(Config(model=str(ready), device="cpu"))[0].quantization == config["quant_method"]
    own = load(plain)
    for name, shard in load(ready).items():
        assert torch.equal(shard.target.view(torch.uint8), own[name].target.view(torch.uint8)), name
        if shard.scales is not None:
            scales = own[name].scales
            assert scales is not None and torch.equal(shard.scales, scales)
    assert sum(shard.scales is not None for shard in own.values()) == 3 * 7


def test_shards_of_ranks_are_slices_of_the_whole(tmp_path: Path) -> None:
    path = make_model(tmp_path, "llama")
    quantize(path, COMPRESSED)
    whole = load(path)
    for rank in range(2):
        for name, shard in load(path, tp_rank=rank, tp_size=2).items():
            part = slice(shard.start, shard.stop)
            index: Any = part if shard.dim == 0 else (slice(None), part)
            assert torch.equal(shard.target.float(), whole[name].target.float()[index])
            if shard.scales is not None:
                scales = whole[name].scales
                assert scales is not None
                assert torch.equal(shard.scales, scales[part] if shard.dim == 0 else scales)


def test_missing_scales_and_undeclared_fp8_are_refused(tmp_path: Path) -> None:
    path = make_model(tmp_path)
    quantize(path, COMPRESSED)
    files = json.loads((path / INDEX_FILE).read_text())["weight_map"]
    gone = "model.layers.1.mlp.down_proj.weight_scale"
    edit_json(path / INDEX_FILE, weight_map={name: file for name, file in files.items() if name != gone})
    with pytest.raises(ModelError, match=f"no weights file contains the tensor '{gone}'"):
        load(path)
    with pytest.raises(ModelError, match="is of type F8_E4M3; supported are F64"):
        load(path, quantized=False)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {**COMPRESSED, "ignore": ["model.layers.1.mlp.up_proj"]},
            r"excludes 'model\.layers\.1\.mlp\.up_proj' but not 'model\.layers\.1\.mlp\.gate_proj'",
        ),
        ({**COMPRESSED, "ignore": "lm_head"}, "'ignore' must be a list of modules, not 'lm_head'"),
        ({**COMPRESSED, "ignore": [["lm_head"]]}, "'ignore' must be a list of modules"),
        (
            {**COMPRESSED, "ignore": ["re:(lm_head"]},
            r"'\(lm_head' is not a valid regular expression: missing \)",
        ),
        ({**COMPRESSED, "ignore": [f"re:{n}+" for n in range(65)]}, "65 regular expressions; at most 64"),
        ({**COMPRESSED, "kv_cache_scheme": SCHEME}, "kv_cache_scheme"),
        ({**COMPRESSED, "config_groups": {}}, "has not exactly one of 'config_groups'"),
        (
            {
                **COMPRESSED,
                "config_groups": {"0": {**GROUP, "weights": {**GROUP["weights"], "strategy": "block"}}},
            },
            "has 'block_structure' of weights None",
        ),
        (
            {**COMPRESSED, "config_groups": {"0": {**GROUP, "input_activations": None}}},
            "has 'num_bits' of input_activations None",
        ),
        ({**FBGEMM, "activation_scale_ub": 0}, "'activation_scale_ub' must be more than 0, not 0"),
        ({**FBGEMM, "activation_scale_ub": "high"}, "'activation_scale_ub' must be a number, not 'high'"),
    ],
)
def test_unsupported_quantization_is_refused_by_name(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    path = make_model(tmp_path)
    edit_json(path / "config.json", quantization_config=config)
    with pytest.raises(ModelError, match=message):
        read_model_config(path)


def test_quantized_checkpoint_cannot_be_served_unquantized(tmp_path: Path) -> None:
    path = make_model(tmp_path)
    edit_json(path / "config.json", quantization_config=COMPRESSED)
    with pytest.raises(ConfigError, match="are quantized by the method compressed-tensors"):
        resolve(Config(model=str(path), device="cpu", quantization="none"))


@pytest.mark.parametrize(
    ("config", "bound"),
    [
        (FBGEMM, 1200.0),
        ({**FBGEMM, "activation_scale_ub": 3}, 3.0),
        ({**FBGEMM, "activation_scale_ub": None}, None),
        ({"quant_method": "fbgemm_fp8"}, 1200.0),
        (COMPRESSED, None),
        (None, None),
    ],
)
def test_activation_scale_ub_is_read_from_fbgemm_checkpoints(
    tmp_path: Path, config: dict[str, Any] | None, bound: float | None
) -> None:
    """Without a bound in the checkpoint, transformers takes 1200."""
    path = make_model(tmp_path)
    edit_json(path / "config.json", quantization_config=config)
    assert read_model_config(path).activation_scale_ub == bound


@pytest.mark.parametrize("quantization", ["none", "fp8"])
@pytest.mark.parametrize("family", ["llama", "llama_tied", "qwen3"])
def test_estimated_weight_bytes_equal_allocated_ones(tmp_path: Path, family: str, quantization: Any) -> None:
    check_estimate(read_model_config(make_model(tmp_path, family)), quantization)


def test_estimated_weight_bytes_respect_unquantized_modules(tmp_path: Path) -> None:
    path = make_model(tmp_path, "qwen2")
    edit_json(path / "config.json", quantization_config={**COMPRESSED, "ignore": UNQUANTIZED})
    check_estimate(read_model_config(path), "fp8")


def check_estimate(model: ModelConfig, quantization: Quantization) -> None:
    """Compare the estimate with the bytes of the layers that a rank allocates."""
    for tp_size in (1, 2):
        group = TensorParallelGroup(0, tp_size)
        device = torch.device("meta")
        context = LayerContext(torch.bfloat16, device, group, quantization, unquantized=model.unquantized)
        built = build(model, context, max_positions=8)
        estimate = estimate_weight_bytes(model, tp_size, element_bytes=2, quantization=quantization)
        assert estimate == built.weight_bytes()


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("config", [COMPRESSED, FBGEMM], ids=["compressed-tensors", "fbgemm"])
def test_unquantized_modules_are_read_in_every_spelling(
    tmp_path: Path, config: dict[str, Any], spelling: str
) -> None:
    path = make_model(tmp_path)
    key = "ignore" if config is COMPRESSED else "modules_to_not_convert"
    edit_json(path / "config.json", quantization_config={**config, key: ["lm_head", *SPELLINGS[spelling]]})
    first = [(0, projection) for projection in PACKED_MODULES]
    assert read_model_config(path).unquantized == (*first, (1, "qkv_proj"), (2, "down_proj"))


def test_module_name_does_not_match_inside_a_longer_one(tmp_path: Path) -> None:
    path = make_model(tmp_path, num_hidden_layers=11)
    names = ["model.layers.1.self_attn", "model.layers.1[.]mlp", "proj", "mlp.gate", "self_attn.[o]"]
    edit_json(path / "config.json", quantization_config={**FBGEMM, "modules_to_not_convert": names})
    assert read_model_config(path).unquantized == tuple((1, projection) for projection in PACKED_MODULES)


def test_compressed_tensors_expression_matches_from_the_start_of_a_path(tmp_path: Path) -> None:
    path = make_model(tmp_path, num_hidden_layers=11)
    names = ["re:model.layers.1", r"re:.*\.5\.mlp\.down_proj$", "re:layers", "re:.*self_att$"]
    edit_json(path / "config.json", quantization_config={**COMPRESSED, "ignore": names})
    one, ten = ([(layer, projection) for projection in PACKED_MODULES] for layer in (1, 10))
    assert read_model_config(path).unquantized == (*one, (5, "down_proj"), *ten)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_tokens_equal_transformers_with_the_same_modules_quantized(tmp_path: Path, family: str) -> None:
    plain, ready = (make_model(tmp_path / name, family) for name in ("plain", "ready"))
    quantize(ready, {**COMPRESSED, "ignore": ["lm_head", *UNQUANTIZED]}, unquantized=UNQUANTIZED)
    outputs = generate_greedy(ready, quantization="fp8")
    oracle, all_quantized = load_reference(plain), load_reference(plain)
    quantize_linear_layers(oracle, unquantized=UNQUANTIZED)
    quantize_linear_layers(all_quantized)
    assert oracle_choices(oracle, PROMPTS, outputs) == outputs
    assert oracle_choices(all_quantized, PROMPTS, outputs) != outputs


def test_weights_that_disagree_with_the_configuration_are_refused(tmp_path: Path) -> None:
    some, none = (make_model(tmp_path / name) for name in ("some", "none"))
    quantize(some, COMPRESSED, unquantized=UNQUANTIZED)
    quantize(none, {**COMPRESSED, "ignore": UNQUANTIZED})
    with pytest.raises(ModelError, match=r"'model\.layers\.0\..*' is of type F32; supported are F8_E4M3"):
        load(some)
    with pytest.raises(ModelError, match=r"'model\.layers\.0\..*' is of type F8_E4M3; supported are F64"):
        load(none)


def test_fbgemm_tokens_equal_transformers_with_activations_clamped_to_the_bound(tmp_path: Path) -> None:
    plain, ready = (make_model(tmp_path / name) for name in ("plain", "ready"))
    quantize(ready, {**FBGEMM, "activation_scale_ub": 2.0})
    outputs = generate_greedy(ready, quantization="fp8")
    unbounded, oracle = load_reference(plain), load_reference(plain)
    quantize_linear_layers(unbounded)
    quantize_linear_layers(oracle, 2.0)
    assert oracle_choices(oracle, PROMPTS, outputs) == outputs
    assert oracle_choices(unbounded, PROMPTS, outputs) != outputs
