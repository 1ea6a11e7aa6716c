"""Reading a model directory: supported settings are read, others are refused with one clear message."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_models import FAMILIES, edit_json, make_model
from transformers import AutoConfig

from skiff_runtime.errors import ConfigError, ModelError
from skiff_runtime.layers.rope_scaling import LinearScaling, Llama3Scaling
from skiff_runtime.models.config import ARCHITECTURES, ModelConfig, check_tp_size, read_model_config

OLD_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return make_model(tmp_path, request.param)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return make_model(tmp_path, "llama")


def edited(path: Path, **changes: Any) -> ModelConfig:
    edit_json(path / "config.json", **changes)
    return read_model_config(path)


def test_every_family_is_read(model: Path) -> None:
    config = read_model_config(model)
    assert config.architecture in ARCHITECTURES
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (3, 4, 2)
    assert config.eos_token_ids == (1,)
    assert config.head_dim == (32 if config.architecture.startswith("Qwen3") else 16)


def test_defaults_of_absent_keys_are_those_of_transformers(model: Path) -> None:
    values = json.loads((model / "config.json").read_text())
    for key in ("rope_parameters", "rope_scaling", "rope_theta", "rms_norm_eps"):
        values.pop(key, None)
    (model / "config.json").write_text(json.dumps(values))
    expected, found = AutoConfig.from_pretrained(model), read_model_config(model)
    assert found.rms_norm_eps == expected.rms_norm_eps
    assert found.rope_theta == expected.rope_parameters["rope_theta"]


def test_rope_settings_are_read_from_both_layouts(llama: Path) -> None:
    assert read_model_config(llama).rope_scaling == Llama3Scaling(8.0, 1.0, 4.0, 64)
    old = edited(llama, rope_parameters=..., rope_theta=500000.0, rope_scaling=OLD_LLAMA3)
    assert (old.rope_theta, old.rope_scaling) == (500000.0, Llama3Scaling(32.0, 1.0, 4.0, 8192))
    linear = edited(llama, rope_scaling={"type": "linear", "factor": 2})
    assert linear.rope_scaling == LinearScaling(2.0)
    plain = edited(llama, rope_scaling=None)
    assert plain.rope_scaling is None


def test_dtype_is_read_from_both_keys(llama: Path) -> None:
    assert edited(llama, dtype="bfloat16").dtype == "bfloat16"
    assert edited(llama, dtype=..., torch_dtype="float16").dtype == "float16"
    assert edited(llama, torch_dtype=...).dtype == "float32"


def test_eos_tokens_of_both_files_are_merged(llama: Path) -> None:
    edit_json(llama / "generation_config.json", eos_token_id=[7, 1, 9], temperature=0.6, top_k=20, top_p=0.95)
    config = edited(llama, eos_token_id=[5, 1])
    assert config.eos_token_ids == (1, 5, 7, 9)
    assert (config.sampling.temperature, config.sampling.top_k, config.sampling.top_p) == (0.6, 20, 0.95)
    assert config.sampling.min_p is None


def test_generation_config_is_optional(llama: Path) -> None:
    (llama / "generation_config.json").unlink()
    assert read_model_config(llama).eos_token_ids == (1,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "GPT2LMHeadModel is not supported; supported are LlamaForCausal",
        ),
        ({"architectures": ...}, "must name the model's class"),
        ({"vocab_size": ...}, "lacks 'vocab_size'"),
        ({"hidden_size": "big"}, "'hidden_size' must be a positive whole number, not 'big'"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers' must be a positive"),
        ({"num_hidden_layers": 1 << 31}, "'num_hidden_layers' must be at most 1024, not 2147483648"),
        ({"hidden_size": 1 << 63}, "'hidden_size' must be at most 2147483647"),
        ({"max_position_embeddings": 1 << 25}, "'max_position_embeddings' must be at most 16777216"),
        ({"rms_norm_eps": 10**400}, "'rms_norm_eps' must be a number"),
        ({"num_key_value_heads": 3}, "3 KV heads do not divide 4"),
        ({"head_dim": 15}, "must be even"),
        ({"hidden_act": "gelu"}, "activation 'gelu' is not supported"),
        ({"dtype": "float8"}, "dtype 'float8' is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "has 'bits' None"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}},
            "rope type 'dynamic' is not supported.*dynamic NTK.*supported are .*--rope-scaling",
        ),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope type 'longrope' is not supported"),
        ({"rope_parameters": {"rope_type": "mrope"}}, "rope type 'mrope' is not supported; supported are"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "'full_attention'.* not supported"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "both 'rope_parameters' and 'rope_scaling'",
        ),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 4.0}}, "lacks 'low_freq_factor'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": -1}}, "'factor' must be above 0"),
        ({"rope_parameters": [1]}, "'rope_parameters' must be an object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"eos_token_id": "<end>"}, "must be a token id or a list"),
        ({"tie_word_embeddings": "yes"}, "must be true or false"),
    ],
)
def test_unsupported_setting_is_refused_by_name(llama: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        edited(llama, **changes)


@pytest.mark.parametrize(
    ("key", "value"),
    [("top_k", 1e300), ("top_k", -2), ("temperature", -0.5), ("top_p", 1.5), ("min_p", -1), ("top_p", "x")],
)
def test_recommended_sampling_out_of_range_is_refused(llama: Path, key: str, value: object) -> None:
    (llama / "generation_config.json").write_text(json.dumps({key: value}))
    with pytest.raises(ModelError, match=rf"generation_config\.json: '{key}' must be"):
        read_model_config(llama)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\ufffe", "[" * 100_000])
def test_malformed_config_json_is_refused(llama: Path, text: str) -> None:
    (llama / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        read_model_config(llama)


def test_missing_directory_and_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        read_model_config(tmp_path / "absent")
    with pytest.raises(ModelError, match=r"cannot read .*config\.json: No such file"):
        read_model_config(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="is not a directory"):
        read_model_config(tmp_path / "file")


def test_every_layer_of_mistral_has_its_sliding_window(tmp_path: Path) -> None:
    path = make_model(tmp_path, "mistral", sliding_window=128)
    assert read_model_config(path).sliding_windows == (128,) * 3
    assert read_model_config(path, max_model_len=129).sliding_windows == (128,) * 3
    assert edited(path, sliding_window=...).sliding_windows == (None,) * 3  # the default, 4,096, exceeds 512
    assert edited(path, max_position_embeddings=8192).sliding_windows == (4096,) * 3
    assert edited(path, sliding_window=None).sliding_windows == (None,) * 3
    assert edited(path, sliding_window=7, layer_types=["sliding_attention"] * 3).sliding_windows == (7,) * 3
    with pytest.raises(ModelError, match="remove 'layer_types'"):
        edited(path, layer_types=["sliding_attention", "full_attention", "full_attention"])


def test_window_that_no_sequence_exceeds_is_full_attention(tmp_path: Path) -> None:
    path = make_model(tmp_path, "mistral", sliding_window=128)
    assert read_model_config(path, max_model_len=128).sliding_windows == (None,) * 3
    assert edited(path, sliding_window=512).sliding_windows == (None,) * 3


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_layers_of_qwen_have_a_window_by_flag_and_number(tmp_path: Path, family: str) -> None:
    path = make_model(tmp_path, family)
    edit_json(path / "config.json", layer_types=..., sliding_window=64)
    assert edited(path, use_sliding_window=False).sliding_windows == (None,) * 3
    assert edited(path, use_sliding_window=True, max_window_layers=3).sliding_windows == (None,) * 3
    assert edited(path, max_window_layers=2).sliding_windows == (None, None, 64)
    assert edited(path, max_window_layers=0).sliding_windows == (64,) * 3
    assert edited(path, max_window_layers=...).sliding_windows == (None,) * 3  # the default is 28
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert edited(path, layer_types=kinds).sliding_windows == (64, None, 64)
    edit_json(path / "config.json", sliding_window=..., max_position_embeddings=8192)
    assert read_model_config(path).sliding_windows == (4096, None, 4096)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window": 0}, "'sliding_window' must be a positive whole number, not 0"),
        ({"sliding_window": "wide"}, "'sliding_window' must be"),
        ({"max_window_layers": -1}, "'max_window_layers' must be a whole number, not -1"),
        ({"max_window_layers": "all"}, "'max_window_layers' must be"),
        ({"layer_types": ["sliding_attention"]}, "'layer_types' must be a list of 3"),
        ({"layer_types": ["chunked_attention"] * 3}, "layer type 'chunked_attention' is not supported"),
        ({"layer_types": ["sliding_attention"] * 3, "use_sliding_window": False}, "no window is enabled"),
        ({"layer_types": ["sliding_attention"] * 3, "sliding_window": None}, "no window is enabled"),
        ({"use_sliding_window": 1}, "must be true or false"),
    ],
)
def test_malformed_window_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = make_model(tmp_path, "qwen2")
    edit_json(path / "config.json", use_sliding_window=True, sliding_window=64, layer_types=...)
    with pytest.raises(ModelError, match=message):
        edited(path, **changes)


def test_tp_size_must_divide_heads(llama: Path) -> None:
    config = read_model_config(llama)
    check_tp_size(config, 2)
    check_tp_size(config, 4)
    with pytest.raises(ConfigError, match="--tp 3 does not divide the model's 4 attention heads"):
        check_tp_size(config, 3)
    with pytest.raises(ConfigError, match="--tp 8"):
        check_tp_size(config, 8)


def test_config_module_imports_no_torch() -> None:
    code = "import sys, skiff_runtime.models.config as c; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
