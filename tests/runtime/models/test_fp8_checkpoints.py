"""Checkpoints that are in eight bits already: taken as they are, but for what is refused."""

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
    own_tokens,
    quantize,
    round_linear_layers,
)
from tiny_models import edit_json, load_reference, make_model, oracle_choices

from skiff_runtime.config import Config, Quantization
from skiff_runtime.distributed.tensor_parallel import TensorParallelGroup
from skiff_runtime.errors import ConfigError, ModelError
from skiff_runtime.layers.projections import PACKED_MODULES
from skiff_runtime.layers.sharding import LayerContext, Piece
from skiff_runtime.models.checkpoint import INDEX_FILE
from skiff_runtime.models.config import ModelConfig, read_model_config
from skiff_runtime.models.footprint import weight_bytes as reckoned
from skiff_runtime.models.registry import make_model as build
from skiff_runtime.models.weight_loader import load_weights, weight_bytes
from skiff_runtime.processes.resolve import resolve

ATTENTION = [f"self_attn.{name}_proj" for name in "qkvo"]
FEED_FORWARD = [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
LEFT_OUT = [
    *(f"model.layers.0.{name}" for name in (*ATTENTION, *FEED_FORWARD)),
    *(f"model.layers.1.{name}" for name in ATTENTION[:3]),
    "model.layers.2.mlp.down_proj",
]
"""A whole layer, a product before which a norm does not round, and one before which the activation does not."""
WAYS = {
    "names": LEFT_OUT,
    "modules": ["model.layers.0", *LEFT_OUT[7:10], "2.mlp.down_proj"],
    "expressions": [
        r"re:model\.layers\.0\..*",
        r"re:.*\.1\.self_attn\.[qkv]_proj$",
        "model.layers.2.mlp.d.*",
    ],
}
"""Ways to say it."""


def load(path: Path, *, quantized: bool = True, rank: int = 0, size: int = 1) -> dict[str, Piece]:
    """The pieces of a rank's model, filled."""
    group = TensorParallelGroup(rank, size)
    config = read_model_config(path)
    kind: Quantization = "fp8" if quantized else "none"
    placement = LayerContext(torch.float32, torch.device("cpu"), group, kind, unquantized=config.unquantized)
    model = build(config, placement, max_positions=8)
    load_weights(model, "safetensors", lambda share: None)
    return {piece.name: piece for piece in model.pieces()}


@pytest.mark.parametrize("config", [COMPRESSED, FBGEMM], ids=["compressed-tensors", "fbgemm"])
@pytest.mark.parametrize("shape", [(-1, 1), (-1,)], ids=["column", "flat"])
def test_quantized_checkpoint_is_taken_as_it_is(
    tmp_path: Path, config: dict[str, Any], shape: tuple[int, ...]
) -> None:
    plain, ready = (make_model(tmp_path / name, "qwen2") for name in ("plain", "ready"))
    quantize(ready, config, shape)
    assert resolve(Config(model=str(ready), device="cpu"))[0].quantization == "fp8"
    own = load(plain)
    for name, piece in load(ready).items():
        assert torch.equal(piece.target.view(torch.uint8), own[name].target.view(torch.uint8)), name
        if piece.scales is not None:
            scales = own[name].scales
            assert scales is not None and torch.equal(piece.scales, scales)
    assert sum(piece.scales is not None for piece in own.values()) == 3 * 7


def test_parts_of_ranks_are_parts_of_the_whole(tmp_path: Path) -> None:
    path = make_model(tmp_path, "llama")
    quantize(path, COMPRESSED)
    whole = load(path)
    for rank in range(2):
        for name, piece in load(path, rank=rank, size=2).items():
            part = slice(piece.start, piece.stop)
            index: Any = part if piece.dim == 0 else (slice(None), part)
            assert torch.equal(piece.target.float(), whole[name].target.float()[index])
            if piece.scales is not None:
                scales = whole[name].scales
                assert scales is not None
                assert torch.equal(piece.scales, scales[part] if piece.dim == 0 else scales)


def test_scales_are_required_beside_eight_bit_weights(tmp_path: Path) -> None:
    path = make_model(tmp_path)
    quantize(path, COMPRESSED)
    files = json.loads((path / INDEX_FILE).read_text())["weight_map"]
    gone = "model.layers.1.mlp.down_proj.weight_scale"
    edit_json(path / INDEX_FILE, weight_map={name: file for name, file in files.items() if name != gone})
    with pytest.raises(ModelError, match=f"no weights file holds the tensor '{gone}'"):
        load(path)
    with pytest.raises(ModelError, match="is of type F8_E4M3; supported are F64"):
        load(path, quantized=False)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"quant_method": "awq"}, "is by the method 'awq'"),
        (
            {**COMPRESSED, "ignore": ["model.layers.1.mlp.up_proj"]},
            r"leaves out 'model\.layers\.1\.mlp\.up_proj' but not 'model\.layers\.1\.mlp\.gate_proj'",
        ),
        ({**COMPRESSED, "ignore": "lm_head"}, "'ignore' must be a list of modules, not 'lm_head'"),
        ({**COMPRESSED, "ignore": [["lm_head"]]}, "'ignore' must be a list of modules"),
        ({**COMPRESSED, "ignore": ["re:(lm_head"]}, r"'\(lm_head' is no regular expression: missing \)"),
        ({**COMPRESSED, "ignore": [f"re:{n}+" for n in range(65)]}, "65 regular expressions; at most 64"),
        ({**COMPRESSED, "kv_cache_scheme": SCHEME}, "kv_cache_scheme"),
        ({**COMPRESSED, "config_groups": {}}, "has not exactly one of 'config_groups'"),
        (
            {
                **COMPRESSED,
                "config_groups": {"0": {**GROUP, "weights": {**GROUP["weights"], "strategy": "block"}}},
            },
            "has 'strategy' of weights 'block'",
        ),
        (
            {**COMPRESSED, "config_groups": {"0": {**GROUP, "input_activations": None}}},
            "has 'num_bits' of input_activations None",
        ),
        ({**FBGEMM, "activation_scale_ub": 0}, "'activation_scale_ub' must be more than 0, not 0"),
        ({**FBGEMM, "activation_scale_ub": "high"}, "'activation_scale_ub' must be a number, not 'high'"),
    ],
)
def test_other_quantizations_are_refused_by_name(tmp_path: Path, config: dict[str, Any], says: str) -> None:
    path = make_model(tmp_path)
    edit_json(path / "config.json", quantization_config=config)
    with pytest.raises(ModelError, match=says):
        read_model_config(path)


def test_a_quantized_checkpoint_cannot_be_served_in_its_old_type(tmp_path: Path) -> None:
    path = make_model(tmp_path)
    edit_json(path / "config.json", quantization_config=COMPRESSED)
    with pytest.raises(ConfigError, match="are in fp8 already"):
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
def test_bound_of_activations_is_that_of_fbgemm(
    tmp_path: Path, config: dict[str, Any] | None, bound: float | None
) -> None:
    """Where a checkpoint is silent, transformers takes 1200."""
    path = make_model(tmp_path)
    edit_json(path / "config.json", quantization_config=config)
    assert read_model_config(path).activation_scale_ub == bound


@pytest.mark.parametrize("quantization", ["none", "fp8"])
@pytest.mark.parametrize("family", ["llama", "llama_tied", "qwen3"])
def test_reckoned_bytes_are_those_of_the_model(tmp_path: Path, family: str, quantization: Any) -> None:
    check_reckoned(read_model_config(make_model(tmp_path, family)), quantization)


def test_reckoned_bytes_heed_what_is_left_out(tmp_path: Path) -> None:
    path = make_model(tmp_path, "qwen2")
    edit_json(path / "config.json", quantization_config={**COMPRESSED, "ignore": LEFT_OUT})
    check_reckoned(read_model_config(path), "fp8")


def check_reckoned(model: ModelConfig, quantization: Quantization) -> None:
    """What is reckoned is what ranks hold."""
    for size in (1, 2):
        group = TensorParallelGroup(0, size)
        device = torch.device("meta")
        placement = LayerContext(torch.bfloat16, device, group, quantization, unquantized=model.unquantized)
        built = build(model, placement, max_positions=8)
        assert reckoned(model, size, element_bytes=2, quantization=quantization) == weight_bytes(built)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("config", [COMPRESSED, FBGEMM], ids=["compressed-tensors", "fbgemm"])
def test_what_is_left_out_is_read_however_it_is_said(
    tmp_path: Path, config: dict[str, Any], way: str
) -> None:
    path = make_model(tmp_path)
    key = "ignore" if config is COMPRESSED else "modules_to_not_convert"
    edit_json(path / "config.json", quantization_config={**config, key: ["lm_head", *WAYS[way]]})
    first = [(0, product) for product in PACKED_MODULES]
    assert read_model_config(path).unquantized == (*first, (1, "qkv"), (2, "down"))


def test_a_name_is_no_part_of_a_longer_one(tmp_path: Path) -> None:
    path = make_model(tmp_path, num_hidden_layers=11)
    names = ["model.layers.1.self_attn", "model.layers.1[.]mlp", "proj", "mlp.gate", "self_attn.[o]"]
    edit_json(path / "config.json", quantization_config={**FBGEMM, "modules_to_not_convert": names})
    assert read_model_config(path).unquantized == tuple((1, product) for product in PACKED_MODULES)


def test_an_expression_of_compressed_tensors_says_how_a_path_begins(tmp_path: Path) -> None:
    path = make_model(tmp_path, num_hidden_layers=11)
    names = ["re:model.layers.1", r"re:.*\.5\.mlp\.down_proj$", "re:layers", "re:.*self_att$"]
    edit_json(path / "config.json", quantization_config={**COMPRESSED, "ignore": names})
    one, ten = ([(layer, product) for product in PACKED_MODULES] for layer in (1, 10))
    assert read_model_config(path).unquantized == (*one, (5, "down"), *ten)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_tokens_are_those_of_transformers_that_rounds_all_but_what_is_left_out(
    tmp_path: Path, family: str
) -> None:
    plain, ready = (make_model(tmp_path / name, family) for name in ("plain", "ready"))
    quantize(ready, {**COMPRESSED, "ignore": ["lm_head", *LEFT_OUT]}, left_out=LEFT_OUT)
    outputs = own_tokens(ready, quantization="fp8")
    oracle, all_rounded = load_reference(plain), load_reference(plain)
    round_linear_layers(oracle, left_out=LEFT_OUT)
    round_linear_layers(all_rounded)
    assert oracle_choices(oracle, PROMPTS, outputs) == outputs
    assert oracle_choices(all_rounded, PROMPTS, outputs) != outputs


def test_a_file_that_disagrees_about_what_is_left_out_is_refused(tmp_path: Path) -> None:
    some, none = (make_model(tmp_path / name) for name in ("some", "none"))
    quantize(some, COMPRESSED, left_out=LEFT_OUT)
    quantize(none, {**COMPRESSED, "ignore": LEFT_OUT})
    with pytest.raises(ModelError, match=r"'model\.layers\.0\..*' is of type F32; supported are F8_E4M3"):
        load(some)
    with pytest.raises(ModelError, match=r"'model\.layers\.0\..*' is of type F8_E4M3; supported are F64"):
        load(none)


def test_tokens_of_an_fbgemm_checkpoint_are_those_of_activations_cut_at_its_bound(tmp_path: Path) -> None:
    plain, ready = (make_model(tmp_path / name) for name in ("plain", "ready"))
    quantize(ready, {**FBGEMM, "activation_scale_ub": 2.0})
    outputs = own_tokens(ready, quantization="fp8")
    unbound, oracle = load_reference(plain), load_reference(plain)
    round_linear_layers(unbound)
    round_linear_layers(oracle, 2.0)
    assert oracle_choices(oracle, PROMPTS, outputs) == outputs
    assert oracle_choices(unbound, PROMPTS, outputs) != outputs
