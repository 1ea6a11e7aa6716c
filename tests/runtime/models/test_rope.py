"""RoPE settings: tables of cosines and sines equal those of transformers, and --rope-scaling serves a longer context."""

import json
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import edit_json, make_model
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from skiff_runtime.config import Config
from skiff_runtime.errors import ConfigError, ModelError
from skiff_runtime.json_file import JsonObject
from skiff_runtime.layers.rope_scaling import YarnScaling
from skiff_runtime.layers.rotary import RotaryEmbedding
from skiff_runtime.layers.sharding import LayerContext
from skiff_runtime.models.config import read_model_config
from skiff_runtime.models.rope import read_rope
from skiff_runtime.processes.resolve import resolve

YARN: Final[dict[str, Any]] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32768,
    "rope_theta": 1e6,
}
OPTION: Final[dict[str, Any]] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def table_of(rope: dict[str, Any], head_dim: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Return our table [length, 2, head_dim], cosines before sines, with the sign of the sines taken back."""
    source = JsonObject("config.json", {"max_position_embeddings": 1 << 15, "rope_parameters": rope})
    context = LayerContext(dtype, torch.device("cpu"))
    embedding = RotaryEmbedding(head_dim, *read_rope(source), length=length, context=context)
    zeros = torch.zeros(1, dtype=torch.int64)
    table = embedding.for_step(zeros, zeros).cos_sin.clone()
    table[:, 1, : head_dim // 2].neg_()
    return table


def reference_of(rope: dict[str, Any], head_dim: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=1 << 15,
        rope_parameters=dict(rope),
    )
    made = LlamaRotaryEmbedding(config)
    return torch.stack(made(torch.zeros(1, dtype=dtype), torch.arange(length)[None]), dim=2)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"factor": 2.5, "beta_fast": 8, "beta_slow": 2},
        {"truncate": False},
        {"attention_factor": 1.3},
        {"mscale": 1.0, "mscale_all_dim": 0.8},
        {"mscale": 0.7, "mscale_all_dim": 1.0, "factor": 40.0, "original_max_position_embeddings": 4096},
        {"mscale": 1.0},
        {"factor": 1.0},
        {"beta_fast": 1, "beta_slow": 1, "truncate": False},
        {"rope_theta": 10000.0, "original_max_position_embeddings": 64},
        {"finetuned": True},
    ],
    ids=str,
)
def test_yarn_table_equals_that_of_transformers(changes: dict[str, Any], dtype: torch.dtype) -> None:
    """To the bit, in the model's type."""
    rope = {**YARN, **changes}
    expected = reference_of(rope, 128, 5000, dtype)
    assert torch.equal(table_of(rope, 128, 5000, dtype), expected)


@settings(max_examples=60, deadline=None)
@given(
    factor=st.floats(1, 64),
    original=st.integers(1, 1 << 17),
    theta=st.floats(100, 1e7),
    half=st.integers(1, 64),
    beta_slow=st.floats(0.1, 8),
    ratio=st.floats(1, 64),
    truncate=st.booleans(),
)
def test_yarn_table_equals_that_of_transformers_for_any_settings(
    factor: float, original: int, theta: float, half: int, beta_slow: float, ratio: float, truncate: bool
) -> None:
    rope = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "rope_theta": theta,
        "beta_slow": beta_slow,
        "beta_fast": beta_slow * ratio,
        "truncate": truncate,
    }
    expected = reference_of(rope, 2 * half, 300, torch.float32)
    assert torch.equal(table_of(rope, 2 * half, 300, torch.float32), expected)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 5e5},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ],
    ids=lambda rope: str(rope["rope_type"]),
)
def test_other_tables_equal_those_of_transformers(rope: dict[str, Any]) -> None:
    """Up to a few roundings, which llama3's terms take in another order."""
    expected = reference_of(rope, 64, 2000, torch.float32)
    torch.testing.assert_close(table_of(rope, 64, 2000, torch.float32), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("rope", "top", "original", "factor"),
    [
        ({"factor": 4.0, "original_max_position_embeddings": 8192}, None, 8192, 4.0),
        ({"factor": 4.0}, None, 512, 4.0),
        ({"factor": 4.0, "original_max_position_embeddings": 8192}, 2048, 2048, 4.0),
        ({"original_max_position_embeddings": 64}, None, 64, 8.0),
        ({"factor": None, "original_max_position_embeddings": 128}, None, 128, 4.0),
    ],
    ids=str,
)
def test_context_is_the_original_one_times_the_factor(
    tmp_path: Path, rope: dict[str, Any], top: int | None, original: int, factor: float
) -> None:
    """``original_max_position_embeddings`` may stand beside the RoPE settings, and either may be left out."""
    path = make_model(tmp_path)
    settings_of_rope = {"rope_type": "yarn", "rope_theta": 1e4, **rope}
    edit_json(path / "config.json", rope_parameters=settings_of_rope, original_max_position_embeddings=top)
    model = read_model_config(path)
    assert isinstance(model.rope_scaling, YarnScaling)
    assert model.rope_scaling.original_max_position_embeddings == original
    assert (model.rope_scaling.factor, model.max_position_embeddings) == (factor, original * factor)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"factor": 0.5}, "'factor' must be at least 1, not 0.5"),
        ({"factor": 1e9}, "exceeds 16777216 tokens"),
        ({"factor": None, "original_max_position_embeddings": None}, "lacks 'factor'"),
        ({"beta_fast": 0}, "'beta_fast' must be above 0"),
        ({"beta_fast": 1, "beta_slow": 2}, "'beta_fast' must be at least 'beta_slow', which is 2"),
        ({"rope_theta": 1.0}, "'rope_theta' must be above 1"),
        ({"attention_factor": -1.0}, "'attention_factor' must be above 0"),
        ({"truncate": "no"}, "'truncate' must be true or false"),
        ({"attn_factor": 1.0}, "'attn_factor' is not a setting of YaRN"),
    ],
    ids=str,
)
def test_malformed_yarn_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = make_model(tmp_path)
    edit_json(path / "config.json", rope_parameters={**YARN, **changes})
    with pytest.raises(ModelError, match=message):
        read_model_config(path)


def test_option_replaces_the_scaling_and_keeps_the_base(tmp_path: Path) -> None:
    path = make_model(tmp_path)  # with llama3's scaling
    model = read_model_config(path, rope_scaling=json.dumps({**OPTION, "beta_fast": 16}))
    assert isinstance(model.rope_scaling, YarnScaling) and model.rope_scaling.beta_fast == 16
    assert (model.rope_theta, model.max_position_embeddings) == (10000.0, 128)
    edit_json(
        path / "config.json", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 7e4}
    )
    model = read_model_config(path, rope_scaling=json.dumps(OPTION))
    assert (model.rope_theta, model.max_position_embeddings) == (7e4, 128)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("yarn", "--rope-scaling must be a JSON object such as"),
        ("[" * 100_000, "--rope-scaling must be a JSON object"),
        ("[4]", "--rope-scaling must be a JSON object"),
        ('{"rope_type": "linear", "factor": 2}', "--rope-scaling: 'rope_type' must be 'yarn', not 'linear'"),
        ('{"rope_type": "yarn", "original_max_position_embeddings": 32}', "--rope-scaling lacks 'factor'"),
        ('{"rope_type": "yarn", "factor": 4}', "--rope-scaling lacks 'original_max_position_embeddings'"),
        (json.dumps({**OPTION, "factr": 2}), "--rope-scaling: 'factr' is not a setting of YaRN"),
        (json.dumps({**OPTION, "factor": float("nan")}), "--rope-scaling: 'factor' must be a number"),
    ],
)
def test_malformed_option_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    path = make_model(tmp_path)
    with pytest.raises(ModelError, match=message):
        read_model_config(path, rope_scaling=text)


def test_longest_sequence_is_that_of_the_scaled_context(tmp_path: Path) -> None:
    path = make_model(tmp_path, "qwen3", max_position_embeddings=32)
    with pytest.raises(ConfigError, match=r"--max-model-len 33 exceeds the 32 positions.*--rope-scaling"):
        resolve(Config(model=str(path), device="cpu", max_model_len=33))
    scaled = Config(model=str(path), device="cpu", rope_scaling=json.dumps(OPTION))
    assert resolve(scaled)[0].max_model_len == 128
    with pytest.raises(ConfigError, match="--max-model-len 129 exceeds the 128 positions"):
        resolve(Config(model=str(path), device="cpu", rope_scaling=json.dumps(OPTION), max_model_len=129))
