"""Eight-bit weights and KV cache: the arithmetic, checkpoints that have it already, and what becomes of tokens."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import generate, make_engine
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny_models import edit_json, load_reference, make_model, oracle_choices

from skiff_runtime.config import Config
from skiff_runtime.distributed.group import TensorParallel
from skiff_runtime.errors import ConfigError, ModelError
from skiff_runtime.kernels.e4m3 import E4M3, LARGEST, Matrix, round_rows, to_e4m3
from skiff_runtime.kernels.fp8 import scaled_linear
from skiff_runtime.kernels.kv_store import store_kv
from skiff_runtime.layers.placement import Piece, Placement
from skiff_runtime.models.checkpoint import INDEX_FILE
from skiff_runtime.models.config import read_model_config
from skiff_runtime.models.footprint import weight_bytes as reckoned
from skiff_runtime.models.registry import make_model as build
from skiff_runtime.models.weights import load_weights, weight_bytes
from skiff_runtime.resolve import resolve

PROMPTS = [[5, 6, 7], list(range(20, 60)), [9] * 17, list(range(100, 40, -1))]
SCHEME: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True}
GROUP: dict[str, Any] = {
    "targets": ["Linear"],
    "weights": {**SCHEME, "strategy": "channel", "dynamic": False},
    "input_activations": {**SCHEME, "strategy": "token", "dynamic": True},
}
COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["lm_head"],
    "config_groups": {"group_0": GROUP},
    "kv_cache_scheme": None,
}
FBGEMM: dict[str, Any] = {
    "quant_method": "fbgemm_fp8",
    "activation_scale_ub": 1200.0,
    "modules_to_not_convert": ["lm_head"],
}


def load(path: Path, *, quantized: bool = True, rank: int = 0, size: int = 1) -> dict[str, Piece]:
    """The pieces of a rank's model, filled."""
    group = TensorParallel(rank, size)
    placement = Placement(torch.float32, torch.device("cpu"), group, "fp8" if quantized else "none")
    model = build(read_model_config(path), placement, max_positions=8)
    load_weights(model, "safetensors", lambda share: None)
    return {piece.name: piece for piece in model.pieces()}


def quantize(path: Path, config: dict[str, Any], scale_shape: tuple[int, ...] = (-1, 1)) -> None:
    """Rewrite a checkpoint as one whose linear layers are in e4m3."""
    files = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors = load_file(file)
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            tensors[name], scales = round_rows(tensors[name])
            tensors[f"{name}_scale"] = scales.reshape(scale_shape)
        save_file(tensors, file)
        files.update(dict.fromkeys(tensors, file.name))
    edit_json(path / INDEX_FILE, weight_map=files)
    edit_json(path / "config.json", quantization_config=config)


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=40))
@settings(max_examples=200)
def test_rounding_keeps_three_bits_and_the_largest(row: list[float]) -> None:
    values = torch.tensor([row])
    rounded, scales = round_rows(values)
    assert rounded.dtype == E4M3 and scales.shape == (1, 1)
    back = rounded.double() * scales.double()
    step = scales.double() * 2.0**-9  # that of the smallest numbers
    assert ((back - values.double()).abs() <= values.double().abs() / 16 + step).all()
    if values.abs().max() > 1e-8:
        assert back.abs().max().item() == pytest.approx(values.abs().max().item(), rel=1e-5)


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=40), st.floats(0.5, 1e6, width=32))
def test_what_a_row_holds_beyond_the_bound_becomes_the_bound(row: list[float], bound: float) -> None:
    values = torch.tensor([row])
    rounded, scales = round_rows(values, bound)
    cut, wanted = round_rows(values.clamp(-bound, bound))
    assert torch.equal(rounded.float(), cut.float()) and torch.equal(scales, wanted)


def test_what_is_too_large_becomes_the_largest() -> None:
    given = torch.tensor([500.0, -1e30, float("inf"), 449.0, 0.0])
    assert to_e4m3(given).float().tolist() == [LARGEST, -LARGEST, LARGEST, LARGEST, 0.0]


@pytest.mark.parametrize("tokens", [1, 3, 16])
@pytest.mark.parametrize("bias", [False, True])
def test_product_is_that_of_the_rounded_numbers(tokens: int, bias: bool) -> None:
    torch.manual_seed(tokens)
    x, matrix = torch.randn(tokens, 48) * 3, torch.randn(32, 48)
    added = torch.randn(32) if bias else None
    weight, scales = round_rows(matrix)
    rounded, row_scales = round_rows(x)
    exact = (rounded.double() * row_scales.double()) @ (weight.double() * scales.double()).T
    exact = exact if added is None else exact + added.double()
    given = Matrix(weight, scales, torch.zeros(32, dtype=torch.int32))
    torch.testing.assert_close(scaled_linear(x, given, added).double(), exact, rtol=1e-5, atol=1e-4)
    unrounded = x.double() @ matrix.double().T + (0 if added is None else added.double())
    assert (exact - unrounded).norm() / unrounded.norm() < 0.05


def test_cache_takes_keys_and_values_in_eight_bits() -> None:
    pool = (torch.zeros(6, 2, 4, dtype=E4M3), torch.zeros(6, 2, 4, dtype=E4M3))
    keys, values = torch.randn(2, 2, 4), torch.full((2, 2, 4), 1e4)
    store_kv(keys, values, pool, torch.tensor([4, 1]))
    assert torch.equal(pool[0][[4, 1]].float(), to_e4m3(keys).float())
    assert (pool[1][[4, 1]].float() == LARGEST).all()
    assert all((side[[0, 2, 3, 5]].float() == 0).all() for side in pool)


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
        ({**COMPRESSED, "ignore": ["model.layers.0.mlp.down_proj"]}, r"leaves out 'model\.layers\.0"),
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
    assert read_model_config(path).activation_bound == bound


@pytest.mark.parametrize("quantization", ["none", "fp8"])
@pytest.mark.parametrize("family", ["llama", "llama_tied", "qwen3"])
def test_reckoned_bytes_are_those_of_the_model(tmp_path: Path, family: str, quantization: Any) -> None:
    model = read_model_config(make_model(tmp_path, family))
    for size in (1, 2):
        placement = Placement(torch.bfloat16, torch.device("meta"), TensorParallel(0, size), quantization)
        built = build(model, placement, max_positions=8)
        assert reckoned(model, size, element_bytes=2, quantization=quantization) == weight_bytes(built)


def _round_linear_layers(oracle: Any, bound: float = math.inf) -> None:
    """Make transformers compute with rounded weights and, cut at a bound, activations, in float32."""

    def rounded(values: torch.Tensor) -> torch.Tensor:
        flat, scales = round_rows(values.flatten(0, -2))
        return (flat.float() * scales).view(values.shape)

    for name, module in oracle.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.weight.data = rounded(module.weight.data)
            module.register_forward_pre_hook(lambda _module, given: (rounded(given[0].clamp(-bound, bound)),))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_tokens_are_those_of_transformers_with_rounded_numbers(tmp_path: Path, family: str) -> None:
    path = make_model(tmp_path, family)
    engine = make_engine(path, quantization="fp8", page_size=16)
    outputs = generate(engine, PROMPTS, 12, page_size=16, budget=40, slots=4)
    engine.close()
    oracle = load_reference(path)
    _round_linear_layers(oracle)
    assert oracle_choices(oracle, PROMPTS, outputs) == outputs


def test_tokens_of_an_fbgemm_checkpoint_are_those_of_activations_cut_at_its_bound(tmp_path: Path) -> None:
    plain, ready = (make_model(tmp_path / name) for name in ("plain", "ready"))
    quantize(ready, {**FBGEMM, "activation_scale_ub": 2.0})
    engine = make_engine(ready, quantization="fp8", page_size=16)
    outputs = generate(engine, PROMPTS, 12, page_size=16, budget=40, slots=4)
    engine.close()
    unbound, oracle = load_reference(plain), load_reference(plain)
    _round_linear_layers(unbound)
    _round_linear_layers(oracle, 2.0)
    assert oracle_choices(oracle, PROMPTS, outputs) == outputs
    assert oracle_choices(unbound, PROMPTS, outputs) != outputs


@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_eight_bit_cache_gives_the_same_tokens_for_any_page_size_and_chunk(
    tmp_path: Path, quantization: Any
) -> None:
    path = make_model(tmp_path, "qwen3")
    found = []
    for page_size, budget in ((1, 64), (16, 64), (16, 13)):
        engine = make_engine(path, kv_cache_dtype="fp8_e4m3", quantization=quantization, page_size=page_size)
        found.append(generate(engine, PROMPTS, 12, page_size=page_size, budget=budget, slots=4))
        engine.close()
    assert found[0] == found[1] == found[2]
    agreeing = oracle_choices(load_reference(path), PROMPTS, found[0])
    pairs = [
        pair for told, own in zip(agreeing, found[0], strict=True) for pair in zip(told, own, strict=True)
    ]
    assert sum(told == own for told, own in pairs) / len(pairs) > 0.6
