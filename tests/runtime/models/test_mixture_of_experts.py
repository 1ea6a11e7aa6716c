"""Mixtures of experts: configuration, weights, sharding of both kinds, sizes, FP8, and tokens against transformers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_checkpoints import (
    COMPRESSED,
    FBGEMM,
    PROMPTS,
    generate_greedy,
    quantize,
    quantize_linear_layers,
)
from gpus import needs_gpus
from quantized_checkpoints import assert_greedy
from quantized_formats import FORMATS, write_checkpoint
from rank_functions import generated_greedy
from rank_processes import Pools, rank_pools
from safetensors.torch import load_file, save_file
from tiny_models import MOE_FAMILIES, edit_json, load_reference, make_model, oracle_choices

from skiff_runtime.config import Config, Quantization
from skiff_runtime.distributed.tensor_parallel import TensorParallelGroup
from skiff_runtime.errors import ConfigError, ModelError
from skiff_runtime.kernels.constants import FP8_BLOCK
from skiff_runtime.layers.moe import Experts, SparseMoeBlock
from skiff_runtime.layers.moe_config import MoeConfig
from skiff_runtime.layers.sharding import LayerContext, WeightShard
from skiff_runtime.models.checkpoint_files import INDEX_FILE, SINGLE_FILE
from skiff_runtime.models.config import ModelConfig, check_tp_size, read_model_config
from skiff_runtime.models.footprint import (
    count_active_parameters,
    count_parameters,
    estimate_expert_bytes,
    estimate_weight_bytes,
)
from skiff_runtime.models.registry import make_model as build
from skiff_runtime.models.weight_loader import load_weights
from skiff_runtime.processes.resolve import resolve

PARALLEL = pytest.mark.parametrize("expert_parallel", [False, True], ids=["columns", "experts"])
FAMILY = pytest.mark.parametrize("family", MOE_FAMILIES)
BLOCKS = {"qwen3_moe": "mlp", "mixtral": "block_sparse_moe"}
LINEAR = {"qwen3_moe": ("gate_proj", "up_proj", "down_proj"), "mixtral": ("w1", "w3", "w2")}
COUNT = 10


def edited(path: Path, **changes: Any) -> ModelConfig:
    edit_json(path / "config.json", **changes)
    return read_model_config(path)


def moe_of(config: ModelConfig) -> MoeConfig:
    assert config.moe is not None
    return config.moe


def load(
    path: Path,
    *,
    quantization: Quantization = "none",
    rank: int = 0,
    ranks: int = 1,
    expert_parallel: bool = False,
    load_format: str = "safetensors",
) -> dict[str, WeightShard]:
    """Load a rank's model, and return its weight shards by name."""
    config = read_model_config(path)
    context = LayerContext(
        torch.float32,
        torch.device("cpu"),
        TensorParallelGroup(rank, ranks),
        quantization,
        unquantized=config.unquantized,
        stored_format=config.weight_format,
        expert_parallel=expert_parallel,
    )
    model = build(config, context, max_positions=8)
    load_weights(model, load_format, lambda share: None)
    return {shard.name: shard for shard in model.weight_shards()}


def test_settings_of_both_families_are_read(tmp_path: Path) -> None:
    qwen, mixtral = (read_model_config(make_model(tmp_path / family, family)) for family in MOE_FAMILIES)
    moe = moe_of(qwen)
    assert (moe.num_experts, moe.top_k, moe.intermediate_size) == (8, 3, 32)
    assert moe.renormalize and moe.dense_layers == (1,)
    moe = moe_of(mixtral)
    assert (moe.num_experts, moe.top_k, moe.intermediate_size) == (4, 2, 96)
    assert moe.renormalize and moe.dense_layers == ()
    assert read_model_config(make_model(tmp_path / "dense", "qwen3")).moe is None


def test_dense_layers_and_renormalization_follow_the_configuration(tmp_path: Path) -> None:
    path = make_model(tmp_path, "qwen3_moe", num_hidden_layers=6)
    assert moe_of(edited(path, decoder_sparse_step=2)).dense_layers == (0, 1, 2, 4)
    assert moe_of(edited(path, decoder_sparse_step=1, mlp_only_layers=None)).dense_layers == ()
    assert not moe_of(edited(path, norm_topk_prob=...)).renormalize


def test_number_of_experts_is_read_from_both_keys(tmp_path: Path) -> None:
    path = make_model(tmp_path, "qwen3_moe")
    for keys in ({"num_experts": 8, "num_local_experts": ...}, {"num_experts": ..., "num_local_experts": 8}):
        assert moe_of(edited(path, **keys)).num_experts == 8
    assert moe_of(edited(path, num_experts=8)).num_experts == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": ..., "num_local_experts": ...}, "lacks 'num_experts'"),
        ({"num_experts": 7, "num_local_experts": 8}, "'num_experts' and 'num_local_experts' contradict"),
        (
            {"num_experts": 10**9, "num_local_experts": ...},
            "'num_experts' must be at most 4096, not 1000000000",
        ),
        (
            {"num_experts": 0, "num_local_experts": ...},
            "'num_experts' must be a positive whole number, not 0",
        ),
        ({"num_experts_per_tok": ...}, "lacks 'num_experts_per_tok'"),
        ({"num_experts_per_tok": 9}, "'num_experts_per_tok' is 9, but there are 8 experts"),
        ({"moe_intermediate_size": ...}, "lacks 'moe_intermediate_size'"),
        ({"moe_intermediate_size": -1}, "'moe_intermediate_size' must be a positive"),
        ({"norm_topk_prob": "yes"}, "'norm_topk_prob' must be true or false, not 'yes'"),
        ({"decoder_sparse_step": 0}, "'decoder_sparse_step' must be a positive"),
        ({"mlp_only_layers": [3]}, r"'mlp_only_layers' must list layers from 0 to 2, not \[3\]"),
        ({"mlp_only_layers": [True]}, "'mlp_only_layers' must list layers"),
        ({"mlp_only_layers": {"0": 1}}, "'mlp_only_layers' must list layers"),
    ],
)
def test_malformed_setting_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = make_model(tmp_path, "qwen3_moe")
    with pytest.raises(ModelError, match=message):
        edited(path, **changes)


def test_sliding_window_of_mixtral_needs_no_flag(tmp_path: Path) -> None:
    path = make_model(tmp_path, "mixtral", sliding_window=128)
    assert read_model_config(path).sliding_windows == (128,) * 3
    assert read_model_config(path, max_model_len=128).sliding_windows == (None,) * 3
    assert edited(path, sliding_window=...).sliding_windows == (None,) * 3


def test_sliding_window_of_qwen3_moe_needs_its_flag(tmp_path: Path) -> None:
    path = make_model(tmp_path, "qwen3_moe")
    assert edited(path, sliding_window=128, use_sliding_window=False).sliding_windows == (None,) * 3
    assert edited(path, use_sliding_window=True).sliding_windows == (128,) * 3
    wide = edited(path, sliding_window=..., max_position_embeddings=8192)
    assert wide.sliding_windows == (4096,) * 3


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (FBGEMM, "by the method 'fbgemm_fp8', whose bound"),
        (FORMATS["tensor-fp8"].config, "in FP8 with one scale per matrix"),
        (FORMATS["tensor-fp8-static"].config, "in FP8 with activations by a scale of the checkpoint"),
        (FORMATS["compressed-tensor-fp8-static"].config, "in FP8 with activations by a scale"),
        *((FORMATS[name].config, "in 4-bit integers") for name in ("compressed-int4", "awq", "gptq")),
    ],
)
def test_formats_that_experts_lack_are_refused_by_name(
    tmp_path: Path, config: dict[str, Any], problem: str
) -> None:
    """A checkpoint in such a format is served if it leaves all experts unquantized."""
    path = make_model(tmp_path, "qwen3_moe")
    with pytest.raises(
        ModelError, match=rf"quantization_config: the quantization of the experts is {problem}"
    ):
        edited(path, quantization_config=config)
    key = "ignore" if config["quant_method"] == "compressed-tensors" else "modules_to_not_convert"
    ignored = [f"model.layers.{layer}.mlp.experts" for layer in (0, 2)]
    model = edited(path, quantization_config={**config, key: ignored})
    assert model.weight_format is not None and (2, "down_proj") in model.unquantized


def test_tp_size_must_divide_experts_or_their_columns(tmp_path: Path) -> None:
    path = make_model(tmp_path, "qwen3_moe", num_attention_heads=12, num_key_value_heads=12)
    sparse = edited(path, mlp_only_layers=[])
    check_tp_size(sparse, 4)
    check_tp_size(sparse, 4, expert_parallel=True)
    with pytest.raises(
        ConfigError, match="--tp 3 does not divide the model's 8 experts, as --expert-parallel"
    ):
        check_tp_size(sparse, 3, expert_parallel=True)
    with pytest.raises(ConfigError, match="32 columns of an expert; --expert-parallel keeps experts whole"):
        check_tp_size(sparse, 3)
    check_tp_size(edited(path, intermediate_size=97), 4)
    with pytest.raises(ConfigError, match="--tp 4 does not divide the model's 97 MLP columns"):
        check_tp_size(edited(path, mlp_only_layers=[0]), 4)


def test_expert_parallelism_of_a_dense_model_is_refused(tmp_path: Path) -> None:
    path = make_model(tmp_path)
    with pytest.raises(ConfigError, match="--expert-parallel is for mixtures of experts, and Llama"):
        resolve(Config(model=str(path), device="cpu", expert_parallel=True))


@FAMILY
def test_all_tensors_are_loaded_and_belong_to_a_shard(tmp_path: Path, family: str) -> None:
    path = make_model(tmp_path, family)
    tensors: dict[str, torch.Tensor] = {}
    for file in path.glob("*.safetensors"):
        tensors.update(load_file(file))
    shards = load(path)
    assert set(shards) == set(tensors)
    assert f"model.layers.0.{BLOCKS[family]}.experts.1.{LINEAR[family][2]}.weight" in tensors
    for name, shard in shards.items():
        assert torch.equal(shard.target, tensors[name]), name


@FAMILY
@PARALLEL
@pytest.mark.parametrize("ranks", [2, 4])
def test_shards_of_all_ranks_cover_every_tensor_once(
    tmp_path: Path, family: str, ranks: int, expert_parallel: bool
) -> None:
    path = make_model(tmp_path, family)
    whole = {name: shard.target for name, shard in load(path).items()}
    seen = {name: torch.zeros(target.shape, dtype=torch.int) for name, target in whole.items()}
    for rank in range(ranks):
        for name, shard in load(path, rank=rank, ranks=ranks, expert_parallel=expert_parallel).items():
            part = slice(shard.start, shard.stop)
            index: Any = part if shard.dim == 0 else (slice(None), part)
            assert torch.equal(shard.target, whole[name][index])
            seen[name][index] += 1
    for name, count in seen.items():
        assert count.min() >= 1
        if ".experts." in name:
            assert count.max() == 1, name


@PARALLEL
def test_stacked_experts_are_loaded_like_single_ones(tmp_path: Path, expert_parallel: bool) -> None:
    """The layout in which transformers 5 keeps experts in memory, and which it saves if that is requested."""
    single, stacked = (
        make_model(tmp_path / name, "qwen3_moe", shard_size="1GB") for name in ("one", "stacked")
    )
    tensors = load_file(stacked / SINGLE_FILE)
    for layer in (0, 2):
        prefix = f"model.layers.{layer}.mlp.experts."
        gates, ups, downs = (
            torch.stack([tensors.pop(f"{prefix}{expert}.{name}.weight") for expert in range(8)])
            for name in LINEAR["qwen3_moe"]
        )
        tensors[f"{prefix}gate_up_proj"] = torch.cat((gates, ups), dim=1)
        tensors[f"{prefix}down_proj"] = downs
    save_file(tensors, stacked / SINGLE_FILE)
    for quantization in ("none", "fp8"):
        kind: Quantization = "fp8" if quantization == "fp8" else "none"
        expected, found = (
            load(path, quantization=kind, rank=1, ranks=2, expert_parallel=expert_parallel)
            for path in (single, stacked)
        )
        for name, shard in found.items():
            assert torch.equal(shard.target.float(), expected[name].target.float()), name
    misshapen = {**tensors, "model.layers.2.mlp.experts.down_proj": torch.zeros(8, 32, 64)}
    save_file(misshapen, stacked / SINGLE_FILE)
    with pytest.raises(
        ModelError, match=r"experts\.down_proj' has shape \[8, 32, 64\], but .* \[8, 64, 32\]"
    ):
        load(stacked)


def test_missing_expert_is_named(tmp_path: Path) -> None:
    path = make_model(tmp_path, "qwen3_moe", shard_size="1GB")
    tensors = load_file(path / SINGLE_FILE)
    name = "model.layers.2.mlp.experts.7.up_proj.weight"
    del tensors[name]
    save_file(tensors, path / SINGLE_FILE)
    with pytest.raises(ModelError, match=f"no weights file contains the tensor '{name}'"):
        load(path)


@FAMILY
def test_parameters_equal_those_of_transformers(tmp_path: Path, family: str) -> None:
    path = make_model(tmp_path, family)
    model, reference = read_model_config(path), load_reference(path)
    counts, moe = count_parameters(model), moe_of(model)
    assert counts.total == reference.num_parameters()
    experts = sum(
        parameter.numel() for name, parameter in reference.named_parameters() if ".experts." in name
    )
    assert counts.experts == experts
    assert (
        count_active_parameters(model)
        == counts.total - experts * (moe.num_experts - moe.top_k) // moe.num_experts
    )


@FAMILY
@PARALLEL
@pytest.mark.parametrize("quantization", ["none", "fp8"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_estimated_bytes_equal_allocated_ones(
    tmp_path: Path, family: str, ranks: int, quantization: Quantization, expert_parallel: bool
) -> None:
    path = make_model(tmp_path, family)
    ignored = [f"model.layers.2.{BLOCKS[family]}.experts", "model.layers.1.self_attn.o_proj"]
    if quantization == "fp8":
        edit_json(path / "config.json", quantization_config={**COMPRESSED, "ignore": ignored})
    model = read_model_config(path)
    context = LayerContext(
        torch.bfloat16,
        torch.device("meta"),
        TensorParallelGroup(0, ranks),
        quantization,
        unquantized=model.unquantized,
        stored_format=model.weight_format,
        expert_parallel=expert_parallel,
    )
    shards = list(build(model, context, max_positions=8).weight_shards())
    weights, experts = (
        estimate(model, ranks, element_bytes=2, quantization=quantization, expert_parallel=expert_parallel)
        for estimate in (estimate_weight_bytes, estimate_expert_bytes)
    )
    assert weights == sum(shard.nbytes for shard in shards)
    assert experts == sum(shard.nbytes for shard in shards if ".experts." in shard.name)


def test_whole_experts_may_have_columns_that_ranks_do_not_divide(tmp_path: Path) -> None:
    model = read_model_config(make_model(tmp_path, "qwen3_moe", moe_intermediate_size=30))
    moe = moe_of(model)
    counts = count_parameters(model, 4, expert_parallel=True)
    sparse = model.num_layers - len(moe.dense_layers)
    assert counts.experts == sparse * moe.num_experts // 4 * 3 * 30 * model.hidden_size
    sizes = [
        estimate(model, 4, element_bytes=2, quantization="none", expert_parallel=True)
        for estimate in (estimate_weight_bytes, estimate_expert_bytes)
    ]
    assert sizes == [2 * counts.total, 2 * counts.experts]


@PARALLEL
def test_ranks_hold_experts_or_columns(expert_parallel: bool) -> None:
    moe = MoeConfig(num_experts=8, top_k=2, intermediate_size=32, renormalize=True)
    for rank in range(4):
        context = LayerContext(
            torch.float32, torch.device("meta"), TensorParallelGroup(rank, 4), expert_parallel=expert_parallel
        )
        weights = SparseMoeBlock(0, 16, moe, context)._experts.weights
        if expert_parallel:
            assert (weights.gate_up.shape, weights.first_expert) == ((2, 64, 16), 2 * rank)
        else:
            assert (weights.gate_up.shape, weights.first_expert) == ((8, 16, 16), 0)


@FAMILY
def test_fp8_checkpoint_is_loaded_unchanged(tmp_path: Path, family: str) -> None:
    """Routers, which the checkpoint excludes, keep the model's dtype."""
    plain, ready = (make_model(tmp_path / name, family) for name in ("plain", "ready"))
    quantize(ready, {**COMPRESSED, "ignore": ["lm_head", rf"re:.*\.{BLOCKS[family]}\.gate$"]})
    assert resolve(Config(model=str(ready), device="cpu"))[0].quantization == "compressed-tensors"
    own = load(plain, quantization="fp8")
    for name, shard in load(ready, quantization="fp8").items():
        assert torch.equal(shard.target.view(torch.uint8), own[name].target.view(torch.uint8)), name
        if shard.scales is not None:
            scales = own[name].scales
            assert scales is not None and torch.equal(shard.scales, scales)
    assert own[f"model.layers.0.{BLOCKS[family]}.gate.weight"].scales is None
    assert sum(".experts." in name and shard.scales is not None for name, shard in own.items()) in (48, 36)


BLOCK_SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "head_dim": 128,
    "shard_size": "1MB",
}
"""Sizes of which half are whole blocks."""


def dequantize_block_experts(shards: dict[str, WeightShard]) -> dict[str, torch.Tensor]:
    """Return the experts' matrices, float32, by module."""
    found = {}
    for name, shard in shards.items():
        if ".experts." in name and name.endswith(".weight"):
            scales = shards[f"{name}_scale_inv"].target
            spread = scales.repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)
            found[name.removesuffix(".weight")] = shard.target.float() * spread
    return found


@PARALLEL
@pytest.mark.parametrize("name", ["block-fp8", "block-fp8-bf16-scales"])
def test_block_fp8_experts_are_loaded_unchanged(tmp_path: Path, name: str, expert_parallel: bool) -> None:
    path = make_model(tmp_path, "qwen3_moe", **BLOCK_SHAPE)
    written = write_checkpoint(path, FORMATS[name])
    expected = {module: weight for module, weight in written.items() if ".experts." in module}
    whole = dequantize_block_experts(load(path, quantization="fp8"))
    assert whole.keys() == expected.keys() and len(whole) == 2 * 8 * 3
    for module, weight in expected.items():
        assert torch.equal(whole[module], weight), module
    for rank in range(2):
        shards = load(path, quantization="fp8", rank=rank, ranks=2, expert_parallel=expert_parallel)
        for module, weight in dequantize_block_experts(shards).items():
            shard = shards[f"{module}.weight"]
            part = slice(shard.start, shard.stop)
            index: Any = part if shard.dim == 0 else (slice(None), part)
            assert torch.equal(weight, expected[module][index]), module


def test_block_fp8_tokens_equal_transformers_but_for_near_ties(tmp_path: Path) -> None:
    plain, ready = (make_model(tmp_path / each, "qwen3_moe", seed=4, **BLOCK_SHAPE) for each in "ab")
    weights = write_checkpoint(ready, FORMATS["block-fp8"])
    outputs = generate_greedy(ready)
    assert_greedy(plain, weights, FORMATS["block-fp8"], PROMPTS, outputs)
    assert oracle_choices(load_reference(plain), PROMPTS, outputs) != outputs


@PARALLEL
@pytest.mark.parametrize("ranks", [1, 2])
def test_estimated_bytes_of_block_fp8_equal_allocated_ones(
    tmp_path: Path, ranks: int, expert_parallel: bool
) -> None:
    path = make_model(tmp_path, "qwen3_moe", **BLOCK_SHAPE)
    model = edited(path, quantization_config=FORMATS["block-fp8"].config)
    context = LayerContext(
        torch.bfloat16,
        torch.device("meta"),
        TensorParallelGroup(0, ranks),
        "fp8",
        stored_format=model.weight_format,
        expert_parallel=expert_parallel,
    )
    shards = list(build(model, context, max_positions=8).weight_shards())
    weights, experts = (
        estimate(model, ranks, element_bytes=2, quantization="fp8", expert_parallel=expert_parallel)
        for estimate in (estimate_weight_bytes, estimate_expert_bytes)
    )
    assert weights == sum(shard.nbytes for shard in shards)
    assert experts == sum(shard.nbytes for shard in shards if ".experts." in shard.name)


def test_random_block_fp8_experts_have_the_usual_magnitude(tmp_path: Path) -> None:
    path = make_model(tmp_path, "qwen3_moe", **BLOCK_SHAPE)
    edit_json(path / "config.json", quantization_config=FORMATS["block-fp8"].config)
    found = dequantize_block_experts(load(path, quantization="fp8", load_format="dummy"))
    for module, weight in found.items():
        assert 0.5 < weight.std() * weight.shape[1] ** 0.5 < 2, module


def test_experts_that_blocks_do_not_divide_are_refused(tmp_path: Path) -> None:
    config = FORMATS["block-fp8"].config
    for name, size, ranks, error, message in (
        ("one", 192, 1, ModelError, "multiples of 128, but those of this model are 256 x 192"),
        (
            "two",
            128,
            2,
            ConfigError,
            "--tp 2 divides the 128 x 128 blocks of experts, .* use --expert-parallel",
        ),
    ):
        path = make_model(tmp_path / name, "qwen3_moe", **{**BLOCK_SHAPE, "moe_intermediate_size": size})
        edit_json(path / "config.json", quantization_config=config)
        with pytest.raises(error, match=message):
            load(path, quantization="fp8", load_format="dummy", ranks=ranks)
    load(path, quantization="fp8", load_format="dummy", ranks=2, expert_parallel=True)


@PARALLEL
def test_shards_of_fp8_ranks_are_slices_of_the_whole(tmp_path: Path, expert_parallel: bool) -> None:
    path = make_model(tmp_path, "qwen3_moe")
    quantize(path, {**COMPRESSED, "ignore": ["lm_head", r"re:.*mlp\.gate$"]})
    whole = load(path, quantization="fp8")
    for rank in range(2):
        found = load(path, quantization="fp8", rank=rank, ranks=2, expert_parallel=expert_parallel)
        for name, shard in found.items():
            part = slice(shard.start, shard.stop)
            index: Any = part if shard.dim == 0 else (slice(None), part)
            assert torch.equal(shard.target.float(), whole[name].target.float()[index])
            if shard.scales is not None:
                scales = whole[name].scales
                assert scales is not None
                assert torch.equal(shard.scales, scales[part] if shard.dim == 0 else scales)


def test_quantized_router_is_refused(tmp_path: Path) -> None:
    path = make_model(tmp_path, "mixtral", shard_size="1GB")
    quantize_one(path, name := "model.layers.1.block_sparse_moe.gate.weight")
    with pytest.raises(ModelError, match=f"tensor '{name}' is of type F8_E4M3; supported are F64"):
        load(path, quantization="fp8")


def quantize_one(path: Path, name: str) -> None:
    """Quantize one tensor of a checkpoint in a single file."""
    tensors = load_file(path / SINGLE_FILE)
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, path / SINGLE_FILE)
    assert not (path / INDEX_FILE).exists()


@pytest.mark.parametrize(
    ("ignored", "message"),
    [
        (
            ["model.layers.0.mlp.experts.3"],
            r"excludes 'model\.layers\.0\.mlp\.experts\.3\.gate_proj' but not",
        ),
        ([r"re:.*layers\.2\..*\.down_proj$"], r"down_proj' but not '.*gate_proj'.*all experts are computed"),
        (["experts.0.up_proj"], "all experts are computed together"),
    ],
)
def test_excluding_some_of_the_experts_is_refused(tmp_path: Path, ignored: list[str], message: str) -> None:
    path = make_model(tmp_path, "qwen3_moe")
    with pytest.raises(ModelError, match=message):
        edited(path, quantization_config={**COMPRESSED, "ignore": ignored})


def test_excluded_experts_keep_the_dtype_of_the_model(tmp_path: Path) -> None:
    plain, ready = (make_model(tmp_path / name, "qwen3_moe") for name in ("plain", "ready"))
    experts = [f"model.layers.2.mlp.experts.{n}.{linear}" for n in range(8) for linear in LINEAR["qwen3_moe"]]
    ignored = ["lm_head", "mlp.gate", "model.layers.2.mlp"]
    quantize(ready, {**COMPRESSED, "ignore": ignored}, unquantized=experts)
    assert read_model_config(ready).unquantized == ((2, "gate_up_proj"), (2, "down_proj"))
    outputs = generate_greedy(ready, quantization="fp8")
    oracle = load_reference(plain)
    quantize_linear_layers(oracle, unquantized=["model.layers.2.mlp.experts"])
    assert oracle_choices(oracle, PROMPTS, outputs) == outputs


@FAMILY
def test_fp8_tokens_equal_transformers_with_the_same_rounding(tmp_path: Path, family: str) -> None:
    path = make_model(tmp_path, family, seed=2)
    outputs = generate_greedy(path, quantization="fp8")
    plain, oracle = load_reference(path), load_reference(path)
    quantize_linear_layers(oracle)
    assert oracle_choices(oracle, PROMPTS, outputs) == outputs
    assert oracle_choices(plain, PROMPTS, outputs) != outputs


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pools]:
    with rank_pools(tmp_path_factory.mktemp("pools")) as made:
        yield made


@FAMILY
@pytest.mark.parametrize(
    "ranks",
    [pytest.param(2, marks=needs_gpus(2)), pytest.param(4, marks=[needs_gpus(4), pytest.mark.matrix])],
)
def test_ranks_generate_the_tokens_of_transformers(
    pools: Pools, tmp_path: Path, family: str, ranks: int
) -> None:
    """Experts are sharded by columns and by experts; four ranks hold copies of two KV heads."""
    path = make_model(tmp_path / "model", family, seed=11, num_key_value_heads=2)
    settings = [{"tp_size": ranks, "expert_parallel": each} for each in (False, True)]
    first, *others = pools(ranks).run(generated_greedy, path, PROMPTS, COUNT, settings)
    assert all(other == first for other in others)
    reference = load_reference(path)
    for outputs in first:
        assert outputs == oracle_choices(reference, PROMPTS, outputs)


@pytest.mark.parametrize("renormalize", [False, True])
def test_weights_of_experts_are_renormalized_if_the_model_requests_it(
    tmp_path: Path, renormalize: bool
) -> None:
    path = make_model(tmp_path, "qwen3_moe", seed=12, norm_topk_prob=renormalize)
    outputs = generate_greedy(path)
    assert oracle_choices(load_reference(path), PROMPTS, outputs) == outputs
    edit_json(path / "config.json", norm_topk_prob=not renormalize)
    assert generate_greedy(path) != outputs


def test_experts_in_fp8_whose_sizes_the_kernels_cannot_read_are_refused() -> None:
    moe = MoeConfig(num_experts=8, top_k=2, intermediate_size=12, renormalize=True)
    context = LayerContext(torch.bfloat16, torch.device("cuda"), quantization="fp8")
    with pytest.raises(ConfigError, match="multiples of 8 on each rank, but one is 64 x 12"):
        Experts(0, 64, moe, context)


def test_expected_experts_are_those_of_random_choices() -> None:
    moe = MoeConfig(num_experts=128, top_k=8, intermediate_size=1, renormalize=True)
    assert moe.expected_experts(0) == 0
    assert moe.expected_experts(1) == pytest.approx(8)
    torch.manual_seed(0)
    for tokens in (2, 8, 40):
        choices = torch.rand(2000, tokens, 128).topk(8).indices.flatten(1)
        seen = sum(len(set(row)) for row in choices.tolist()) / 2000
        assert moe.expected_experts(tokens) == pytest.approx(seen, rel=0.01)
