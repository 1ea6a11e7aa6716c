"""Quantized checkpoints of every served format: their weights, their tokens, their shards, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_checkpoints import PROMPTS, generate_greedy
from gpus import needs_gpus
from pairwise import mark_beyond_values
from quantized_checkpoints import assert_greedy, edit_tensors
from quantized_formats import (
    FORMATS,
    INPUT_SCALE,
    Tensors,
    awq,
    block_fp8,
    compressed_int4,
    gptq,
    tensor_fp8,
    write_checkpoint,
)
from rank_functions import generated
from rank_processes import RankPool, single_rank
from tiny_models import edit_json, load_reference, make_model, oracle_choices
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from skiff_runtime.config import Config, Quantization
from skiff_runtime.distributed.tensor_parallel import TensorParallelGroup
from skiff_runtime.errors import ConfigError, ModelError
from skiff_runtime.kernels.constants import FP8_BLOCK
from skiff_runtime.kernels.int4_tensors import Int4Weight, dequantize_int4
from skiff_runtime.layers.projections import PACKED_MODULES
from skiff_runtime.layers.sharding import LayerContext, WeightShard
from skiff_runtime.layers.weight_format import Fp8Format, Int4Format
from skiff_runtime.models.config import read_model_config
from skiff_runtime.models.footprint import estimate_weight_bytes
from skiff_runtime.models.registry import make_model as build
from skiff_runtime.models.weight_loader import load_weights
from skiff_runtime.processes.resolve import resolve

SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "shard_size": "1MB",
}
"""Sizes of whole blocks and groups, also of the modules that one matrix packs."""
DIVISIBLE: dict[str, Any] = {**SHAPE, "intermediate_size": 512, "head_dim": 128}
"""Sizes of which half are whole blocks and groups."""
FP8 = {name: kind for name, kind in FORMATS.items() if "fp8" in name}


def load(
    path: Path, *, tp_rank: int = 0, tp_size: int = 1, load_format: str = "safetensors"
) -> list[WeightShard]:
    """Load a rank's model in float32, and return its weight shards."""
    config = read_model_config(path)
    context = LayerContext(
        torch.float32,
        torch.device("cpu"),
        TensorParallelGroup(tp_rank, tp_size),
        config.quantization,
        unquantized=config.unquantized,
        stored_format=config.weight_format,
    )
    model = build(config, context, max_positions=8)
    load_weights(model, load_format, lambda share: None)
    return list(model.weight_shards())


def dequantize_modules(path: Path, shards: list[WeightShard]) -> tuple[Tensors, dict[str, int]]:
    """Return the quantized modules' weights, float32, and the dimension along which ranks divide each."""
    weight_format = read_model_config(path).weight_format
    by_module: dict[str, dict[str, WeightShard]] = {}
    for shard in shards:
        module, _, end = shard.name.rpartition(".")
        if module.endswith("_proj") and end != "bias":
            by_module.setdefault(module, {})[end] = shard
    weights, dims = {}, {}
    for module, parts in by_module.items():
        if isinstance(weight_format, Int4Format):
            weights[module] = _dequantize_int4(weight_format, parts)
        else:
            weights[module] = _dequantize_fp8(parts)
        column_parallel = not module.endswith(("o_proj", "down_proj"))
        dims[module] = 0 if column_parallel else 1
    return weights, dims


def _dequantize_fp8(parts: dict[str, WeightShard]) -> torch.Tensor:
    values = parts["weight"].target.float()
    if "weight_scale_inv" in parts:
        scales = parts["weight_scale_inv"].target.repeat_interleave(FP8_BLOCK, 0)[: len(values)]
        return values * scales.repeat_interleave(FP8_BLOCK, 1)[:, : values.shape[1]]
    return values * parts["weight_scale"].target


def _dequantize_int4(weight_format: Int4Format, parts: dict[str, WeightShard]) -> torch.Tensor:
    packed = parts.get("weight_packed") or parts["qweight"]
    zeros = parts.get("weight_zero_point") or parts.get("qzeros")
    inputs_dim = 1 if "weight_packed" in parts else 0
    inputs = packed.shape[inputs_dim] * (1 if weight_format.packing == "awq" else 8)
    if packed.dim == inputs_dim:
        inputs = (packed.stop - packed.start) * (1 if weight_format.packing == "awq" else 8)
    order = parts["g_idx"].target if weight_format.activation_order else None
    weight = Int4Weight(
        words=packed.target,
        scales=(parts.get("weight_scale") or parts["scales"]).target,
        zeros=zeros.target if zeros is not None and zeros.target.numel() else None,
        inputs=inputs,
        group_size=weight_format.group_size,
        order=order,
        tile_counters=torch.zeros(0),
    )
    dense = dequantize_int4(weight, torch.float32)
    return dense if order is None else dense[:, torch.argsort(order)]


@pytest.mark.parametrize("name", FORMATS)
def test_loaded_weights_equal_the_writer_s(tmp_path: Path, name: str) -> None:
    path = make_model(tmp_path, "qwen2", **SHAPE)
    expected = write_checkpoint(path, FORMATS[name])
    found, _ = dequantize_modules(path, load(path))
    assert found.keys() == expected.keys() and len(found) == 2 * 7
    for module, weight in expected.items():
        assert torch.equal(found[module], weight), module


@pytest.mark.parametrize("name", FORMATS)
def test_tokens_equal_transformers_with_the_dequantized_weights(tmp_path: Path, name: str) -> None:
    plain, ready = (make_model(tmp_path / kind, "qwen2", **SHAPE) for kind in ("plain", "ready"))
    weights = write_checkpoint(ready, FORMATS[name])
    outputs = generate_greedy(ready)
    assert_greedy(plain, weights, FORMATS[name], PROMPTS, outputs)
    assert oracle_choices(load_reference(plain), PROMPTS, outputs) != outputs


@pytest.mark.parametrize(
    ("name", "family"),
    mark_beyond_values(
        ("block-fp8", "tensor-fp8-static", "compressed-int4-asymmetric", "gptq-desc-act"),
        ("llama", "qwen3"),
        rounds=1,
    ),
)
def test_tokens_of_other_families_equal_transformers(tmp_path: Path, name: str, family: str) -> None:
    shape = {**SHAPE, "head_dim": 64}
    plain, ready = (make_model(tmp_path / kind, family, **shape) for kind in ("plain", "ready"))
    weights = write_checkpoint(ready, FORMATS[name])
    outputs = generate_greedy(ready)
    assert_greedy(plain, weights, FORMATS[name], PROMPTS, outputs)


def test_sizes_that_are_no_whole_blocks_are_served(tmp_path: Path) -> None:
    """The hidden size ends inside a block, of outputs and of inputs; so do the last words of four bits."""
    shape = {**SHAPE, "hidden_size": 192, "head_dim": 64, "intermediate_size": 256}
    for number, kind in enumerate((block_fp8(), compressed_int4(32, symmetric=False), awq(64), gptq(64))):
        plain, ready = (
            make_model(tmp_path / f"{number}{end}", "llama", **shape) for end in ("plain", "ready")
        )
        weights = write_checkpoint(ready, kind)
        outputs = generate_greedy(ready)
        assert_greedy(plain, weights, kind, PROMPTS, outputs)


def test_block_fp8_is_dequantized_as_by_transformers(tmp_path: Path) -> None:
    path = make_model(tmp_path, **SHAPE)
    expected = {}

    def collect(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith("weight_scale_inv")]:
            values = tensors[name.removesuffix("_scale_inv")]
            expected[name.removesuffix(".weight_scale_inv")] = Fp8Dequantize(None)._dequantize_one(
                values, tensors[name], torch.float32
            )

    write_checkpoint(path, block_fp8())
    edit_tensors(path, collect)
    found, _ = dequantize_modules(path, load(path))
    assert len(expected) == 2 * 7
    for module, weight in expected.items():
        assert torch.equal(found[module], weight), module


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "gptq-desc-act"])
def test_shards_of_ranks_are_slices_of_the_whole(tmp_path: Path, name: str) -> None:
    path = make_model(tmp_path, "llama", **DIVISIBLE)
    expected = write_checkpoint(path, FORMATS[name])
    for rank in range(2):
        found, dims = dequantize_modules(path, load(path, tp_rank=rank, tp_size=2))
        for module, weight in expected.items():
            assert torch.equal(found[module], weight.chunk(2, dims[module])[rank]), module


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "gptq-desc-act"])
def test_replicated_kv_heads_are_slices_of_the_whole(tmp_path: Path, name: str) -> None:
    """Each of two KV heads is on two of four ranks."""
    path = make_model(tmp_path, "llama", **DIVISIBLE, num_attention_heads=4, num_key_value_heads=2)
    expected = write_checkpoint(path, FORMATS[name])
    for rank in range(4):
        found, dims = dequantize_modules(path, load(path, tp_rank=rank, tp_size=4))
        for module, weight in expected.items():
            if module.endswith(("k_proj", "v_proj")):
                shard = weight.chunk(2)[rank // 2]
            else:
                shard = weight.chunk(4, dims[module])[rank]
            assert torch.equal(found[module], shard), module


@needs_gpus(2)
def test_two_ranks_give_the_tokens_of_one(tmp_path: Path) -> None:
    prompts = [[5, 6, 7], list(range(20, 60))]
    with RankPool(2, tmp_path) as ranks:
        for name in ("block-fp8", "awq"):
            path = make_model(tmp_path / name, "llama", **DIVISIBLE)
            write_checkpoint(path, FORMATS[name])
            first, second = ranks.run(generated, path, prompts, 6)
            assert first == second == generated(single_rank(), path, prompts, 6), name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("block-fp8", r"--tp 2 divides the 128 x 128 blocks of FP8 weights: .*use a smaller --tp"),
        ("awq", r"--tp 2 divides groups of 128 inputs: the shard of '.*down_proj' is 0 to 192 of 384"),
        (
            "gptq-desc-act",
            r"--tp 2 cannot divide '.*o_proj': its inputs are in the order of GPTQ's 'desc_act'",
        ),
    ],
)
def test_divided_blocks_and_groups_are_refused(tmp_path: Path, name: str, message: str) -> None:
    path = make_model(tmp_path, "llama", **SHAPE)
    write_checkpoint(path, FORMATS[name])
    with pytest.raises(ConfigError, match=message):
        load(path, tp_size=2)


def test_modules_that_divide_a_block_are_refused(tmp_path: Path) -> None:
    path = make_model(tmp_path, "llama", **{**SHAPE, "hidden_size": 128})
    write_checkpoint(path, block_fp8())
    with pytest.raises(ModelError, match=r"'.*v_proj\.weight' begins inside a block of 128 outputs"):
        load(path)


def drop(end: str) -> Callable[[Tensors], None]:
    """Return an edit that removes the tensors whose names end so."""

    def edit(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith(end)]:
            del tensors[name]

    return edit


def change(end: str, edit_one: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    """Return an edit of the tensors whose names end so."""

    def edit(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith(end)]:
            tensors[name] = edit_one(tensors[name]).contiguous()

    return edit


def add_reversed_groups(tensors: Tensors) -> None:
    """Add the groups of inputs as compressed-tensors stores them with an order of activations."""
    for name in [name for name in tensors if name.endswith("weight_packed")]:
        inputs = 8 * tensors[name].shape[1]
        groups = torch.arange(inputs, dtype=torch.int32).flip(0) // 128
        tensors[f"{name.removesuffix('weight_packed')}weight_g_idx"] = groups


def count_first_group_twice(groups: torch.Tensor) -> torch.Tensor:
    return groups.clamp(min=1)


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        ("block-fp8", drop("k_proj.weight_scale_inv"), r"contains the tensor '.*k_proj\.weight_scale_inv'"),
        (
            "block-fp8",
            change("down_proj.weight_scale_inv", lambda scales: scales.T),
            r"'.*down_proj\.weight_scale_inv' has shape \[3, 2\], but config\.json implies \[2, 3\]",
        ),
        (
            "block-fp8",
            change("up_proj.weight", lambda weight: weight.float()),
            r"'.*up_proj\.weight' is of type F32; supported are F8_E4M3",
        ),
        ("tensor-fp8-static", drop("o_proj.input_scale"), r"contains the tensor '.*o_proj\.input_scale'"),
        (
            "tensor-fp8",
            change("o_proj.weight_scale", lambda scale: scale.expand(3)),
            r"'.*o_proj\.weight_scale' has shape \[3\]",
        ),
        ("compressed-int4", drop("q_proj.weight_scale"), r"contains the tensor '.*q_proj\.weight_scale'"),
        (
            "compressed-int4",
            change("q_proj.weight_scale", lambda scales: scales.repeat_interleave(2, 1)),
            r"'.*q_proj\.weight_scale' has shape \[256, 4\], but config\.json implies \[256, 2\]",
        ),
        (
            "compressed-int4",
            change("q_proj.weight_shape", lambda shape: shape + 1),
            r"'.*q_proj\.weight_shape' says that the matrix is \[257, 257\], but config\.json implies \[256, 256\]",
        ),
        (
            "compressed-int4-asymmetric",
            drop("v_proj.weight_zero_point"),
            r"contains the tensor '.*v_proj\.weight_zero_point'",
        ),
        ("awq", drop("q_proj.qzeros"), r"contains the tensor '.*q_proj\.qzeros'"),
        (
            "awq",
            change("gate_proj.qweight", lambda words: words[:128]),
            r"'.*gate_proj\.qweight' has shape \[128, 48\], but config\.json implies \[256, 48\]",
        ),
        (
            "awq",
            change("gate_proj.qweight", lambda words: words.long()),
            r"'.*gate_proj\.qweight' is of type I64; supported are I32",
        ),
        (
            "awq",
            change("down_proj.scales", lambda scales: scales[:1]),
            r"'.*down_proj\.scales' has shape \[1, 256\], but config\.json implies \[3, 256\]",
        ),
        (
            "gptq",
            change("q_proj.qzeros", lambda words: words + 1),
            r"'.*q_proj\.qzeros' contains zero points other than 8, but config\.json says 'sym'",
        ),
        (
            "gptq",
            change("down_proj.g_idx", lambda groups: groups.flip(0)),
            r"'.*down_proj\.g_idx' assigns inputs to groups in another order than config\.json implies",
        ),
        (
            "compressed-int4",
            add_reversed_groups,
            r"'.*weight_g_idx' assigns inputs to groups in another order than config\.json implies",
        ),
        ("gptq-desc-act", drop("down_proj.g_idx"), r"contains the tensor '.*down_proj\.g_idx'"),
        (
            "gptq-desc-act",
            change("down_proj.g_idx", count_first_group_twice),
            r"'.*down_proj\.g_idx' must assign 32 inputs to each group",
        ),
        (
            "gptq-desc-act",
            change("k_proj.g_idx", lambda groups: groups.flip(0)),
            r"'.*k_proj\.g_idx' differs from that of another module of the same matrix",
        ),
    ],
)
def test_malformed_checkpoint_is_refused_by_name(
    tmp_path: Path, name: str, edit: Callable[[Tensors], None], message: str
) -> None:
    path = make_model(tmp_path, "llama", **SHAPE)
    write_checkpoint(path, FORMATS[name])
    edit_tensors(path, edit)
    with pytest.raises(ModelError, match=message):
        load(path)


COMPRESSED_INT4 = FORMATS["compressed-int4"].config
COMPRESSED_STATIC = FORMATS["compressed-tensor-fp8-static"].config


def with_weights(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return a compressed-tensors configuration whose scheme of weights is changed."""
    [group] = config["config_groups"].values()
    return {**config, "config_groups": {"group_0": {**group, "weights": {**group["weights"], **changes}}}}


def with_group(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return a compressed-tensors configuration whose only group is changed."""
    [group] = config["config_groups"].values()
    return {**config, "config_groups": {"group_0": {**group, **changes}}}


@pytest.mark.parametrize(
    "config",
    [
        with_weights(COMPRESSED_INT4, actorder="static", observer="mse", observer_kwargs={"a": 1}),
        with_weights(COMPRESSED_INT4, actorder="weight", scale_dtype=None, zp_dtype="torch.int8"),
        {
            **COMPRESSED_INT4,
            "quantization_status": "compressed",
            "global_compression_ratio": 1.5,
            "version": "0.12.2",
            "sparsity_config": {},
            "transform_config": {},
        },
        {**COMPRESSED_INT4, "sparsity_config": {"format": "dense"}},
        {
            **gptq(128).config,
            "damp_percent": 0.01,
            "meta": {"quantizer": ["gptqmodel:1.4.5"]},
            "dynamic": None,
        },
        {**awq(128).config, "backend": "autoawq", "do_fuse": False, "sym": True, "desc_act": False},
    ],
)
def test_settings_that_change_nothing_are_accepted(tmp_path: Path, config: dict[str, Any]) -> None:
    path = make_model(tmp_path)
    edit_json(path / "config.json", quantization_config=config)
    assert isinstance(read_model_config(path).weight_format, Int4Format)


def test_names_of_awq_cover_every_path_that_contains_them(tmp_path: Path) -> None:
    path = make_model(tmp_path, num_hidden_layers=11)
    names = ["layers.1.", "0.mlp.d", "5.self_attn"]
    config = {**awq(128).config, "modules_to_not_convert": names}
    edit_json(path / "config.json", quantization_config=config)
    whole = tuple((1, projection) for projection in PACKED_MODULES)
    expected = (
        (0, "down_proj"),
        *whole,
        (5, "qkv_proj"),
        (5, "o_proj"),
        (10, "down_proj"),
    )
    assert read_model_config(path).unquantized == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "is by the method 'bitsandbytes'"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"has 'weight_block_size' \[64, 64\]"),
        ({"quant_method": "fp8", "activation_scheme": "none"}, "has 'activation_scheme' 'none'"),
        (
            {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": [128, 128]},
            "has blocks of weights and 'activation_scheme' 'static'",
        ),
        ({**block_fp8().config, "scale_fmt": "ue8m0"}, "has 'scale_fmt' 'ue8m0'"),
        ({**block_fp8().config, "modules_to_convert": ["embed_tokens"]}, "covers more than linear layers"),
        (with_weights(COMPRESSED_INT4, num_bits=8), "has 'num_bits' of weights 8"),
        (with_weights(COMPRESSED_INT4, group_size=16), "has 'group_size' 16"),
        *(
            (with_weights(COMPRESSED_INT4, actorder=order), f"has 'actorder' of weights {order!r}")
            for order in ("group", "GROUP", "dynamic", True)
        ),
        (with_weights(COMPRESSED_INT4, rotation="hadamard"), "has the unknown setting 'rotation' of weights"),
        (with_group(COMPRESSED_INT4, output_activations={"num_bits": 8}), r"\('output_activations'\)"),
        (with_group(COMPRESSED_INT4, format="marlin-24"), "has 'format' 'marlin-24' of a group"),
        (with_group(COMPRESSED_INT4, bias={"num_bits": 8}), "has the unknown setting 'bias' of a group"),
        (
            {**COMPRESSED_INT4, "transform_config": {"config_groups": {"u": {"type": "hadamard"}}}},
            r"has online transforms \('transform_config'\)",
        ),
        (
            {**COMPRESSED_INT4, "sparsity_config": {"format": "sparse-24-bitmask"}},
            r"has sparse weights \('sparsity_config'\)",
        ),
        *(
            ({**FORMATS[name].config, "rotation": "quarot"}, "has the unknown setting 'rotation'")
            for name in ("block-fp8", "compressed-int4", "compressed-tensor-fp8", "awq", "gptq")
        ),
        (
            {**tensor_fp8(static=True, compressed=False).config, "kv_cache_quant_targets": ["k_proj"]},
            "KV cache",
        ),
        ({**gptq(128).config, "is_marlin_format": True}, "has 'is_marlin_format' true"),
        (with_weights(COMPRESSED_INT4, strategy="tensor"), "has 'strategy' of weights 'tensor'"),
        ({**COMPRESSED_INT4, "format": "int-quantized"}, "has 'format' 'int-quantized'"),
        (with_weights(COMPRESSED_STATIC, strategy="block"), "has 'block_structure' of weights None"),
        (with_weights(COMPRESSED_STATIC, symmetric=False), "has 'symmetric' of weights False"),
        ({**awq(128).config, "bits": 8}, "has 'bits' 8"),
        ({**awq(128).config, "version": "gemv"}, "has 'version' 'gemv'"),
        ({**awq(128).config, "zero_point": False}, "has 'zero_point' false"),
        ({**awq(128).config, "desc_act": True}, "has 'desc_act' true"),
        ({**awq(128).config, "group_size": 100}, "has 'group_size' 100"),
        ({**gptq(128).config, "bits": 3}, "has 'bits' 3"),
        ({**gptq(128).config, "checkpoint_format": "marlin"}, "has 'checkpoint_format' 'marlin'"),
        ({**gptq(128).config, "pack_dtype": "int16"}, "has 'pack_dtype' 'int16'"),
        ({**gptq(128).config, "lm_head": True}, r"covers the output head \('lm_head'\)"),
        ({**gptq(128).config, "dynamic": {"-:.*": {}}}, r"differs between modules \('dynamic'\)"),
    ],
)
def test_unsupported_quantization_is_refused_by_name(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    path = make_model(tmp_path)
    edit_json(path / "config.json", quantization_config=config)
    with pytest.raises(ModelError, match=message):
        read_model_config(path)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("block-fp8", "fp8"),
        ("tensor-fp8-static", "fp8"),
        ("compressed-tensor-fp8", "compressed-tensors"),
        ("compressed-int4", "compressed-tensors"),
        ("awq", "awq"),
        ("gptq", "gptq"),
    ],
)
def test_quantization_follows_the_checkpoint(tmp_path: Path, name: str, method: Any) -> None:
    path = make_model(tmp_path)
    edit_json(path / "config.json", quantization_config=FORMATS[name].config)
    for option in ("auto", method, *(["fp8"] if name in FP8 else [])):
        config, model = resolve(Config(model=str(path), device="cpu", quantization=option))
        assert config.quantization == method
        assert isinstance(model.weight_format, Fp8Format) is (name in FP8)
    others: set[Quantization] = {"none", "awq", "gptq"} if name in FP8 else {"none", "awq", "gptq", "fp8"}
    for option in others - {method}:
        with pytest.raises(ConfigError, match=f"--quantization {option}: .* by the method {method}"):
            resolve(Config(model=str(path), device="cpu", quantization=option))


def test_methods_of_checkpoints_do_not_quantize(tmp_path: Path) -> None:
    path = make_model(tmp_path)
    with pytest.raises(
        ConfigError, match=r"--quantization awq: .* are not quantized; only fp8 quantizes at load"
    ):
        resolve(Config(model=str(path), device="cpu", quantization="awq"))


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("name", FORMATS)
def test_estimated_weight_bytes_equal_allocated_ones(tmp_path: Path, name: str, tp_size: int) -> None:
    if name == "gptq-desc-act" and tp_size == 2:
        pytest.skip("the ranks cannot divide it")
    path = make_model(tmp_path, **DIVISIBLE)
    unquantized = ["model.layers.1.self_attn.o_proj", "model.layers.0.mlp"]
    key = "ignore" if "config_groups" in FORMATS[name].config else "modules_to_not_convert"
    edit_json(path / "config.json", quantization_config={**FORMATS[name].config, key: unquantized})
    model = read_model_config(path)
    assert len(model.unquantized) == 3
    context = LayerContext(
        torch.bfloat16,
        torch.device("meta"),
        TensorParallelGroup(0, tp_size),
        model.quantization,
        unquantized=model.unquantized,
        stored_format=model.weight_format,
    )
    built = build(model, context, max_positions=8)
    estimate = estimate_weight_bytes(model, tp_size, element_bytes=2, quantization=model.quantization)
    assert estimate == built.weight_bytes()


@pytest.mark.parametrize("name", FORMATS)
def test_random_weights_have_the_usual_magnitude(tmp_path: Path, name: str) -> None:
    path = make_model(tmp_path, **SHAPE)
    edit_json(path / "config.json", quantization_config=FORMATS[name].config)
    found, _ = dequantize_modules(path, load(path, load_format="dummy"))
    again, _ = dequantize_modules(path, load(path, load_format="dummy"))
    for module, weight in found.items():
        assert torch.equal(weight, again[module])
        assert 0.5 < weight.std() * weight.shape[1] ** 0.5 < 2, module


def test_packed_modules_keep_their_own_scales(tmp_path: Path) -> None:
    """Their scales become scales per output, so no weight is quantized again."""
    path = make_model(tmp_path, "llama", **SHAPE)
    expected = write_checkpoint(path, tensor_fp8(static=True, compressed=False))
    shards = {shard.name: shard for shard in load(path)}
    scales = [shards[f"model.layers.0.self_attn.{each}_proj.weight_scale"].target for each in "qkv"]
    assert len({float(each[0]) for each in scales}) == 3
    assert all((each == each[0]).all() for each in scales)
    assert len(expected) == 2 * sum(map(len, PACKED_MODULES.values()))
    found = shards["model.layers.0.self_attn.k_proj.input_scale"].target
    assert found.tolist() == pytest.approx([INPUT_SCALE])


def test_other_names_of_scales_are_read(tmp_path: Path) -> None:
    """transformers names the scales of a whole matrix ``weight_scale_inv`` and ``activation_scale``."""
    paths = [make_model(tmp_path / name, "llama", **SHAPE) for name in ("usual", "other")]
    for path in paths:
        write_checkpoint(path, tensor_fp8(static=True, compressed=False))

    def rename(tensors: Tensors) -> None:
        for old, new in (("weight_scale", "weight_scale_inv"), ("input_scale", "activation_scale")):
            for name in [name for name in tensors if name.endswith(old)]:
                tensors[name.removesuffix(old) + new] = tensors.pop(name)

    edit_tensors(paths[1], rename)
    for usual, other in zip(*map(load, paths), strict=True):
        assert torch.equal(usual.target.float(), other.target.float()), usual.name
