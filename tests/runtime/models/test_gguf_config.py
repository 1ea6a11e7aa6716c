"""The configuration of a GGUF file: equal to that of the model it was made of, and what is not supported is refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from gguf_bytes import ARRAY, BOOL, FLOAT32, INT32, STRING, UINT32, UINT64, GgufBytes
from gguf_models import make_gguf
from tiny_models import edit_json, make_model

from skiff_runtime.config import Config
from skiff_runtime.errors import ConfigError, ModelError
from skiff_runtime.layers.rope_scaling import FrequencyFactors, LinearScaling, YarnScaling
from skiff_runtime.models.config import ModelConfig, SamplingDefaults, read_model_config
from skiff_runtime.processes.resolve import locate, resolve

ENTRIES: dict[str, tuple[int, Any]] = {
    "general.architecture": (STRING, "llama"),
    "llama.context_length": (UINT32, 128),
    "llama.embedding_length": (UINT32, 64),
    "llama.block_count": (UINT32, 2),
    "llama.feed_forward_length": (UINT32, 96),
    "llama.attention.head_count": (UINT32, 4),
    "llama.attention.layer_norm_rms_epsilon": (FLOAT32, 0.5),
    "tokenizer.ggml.tokens": (ARRAY, (STRING, ["a", "b", "c"])),
    "tokenizer.ggml.eos_token_id": (UINT32, 2),
}


def read(directory: Path, **changes: tuple[int, Any] | None) -> ModelConfig:
    """Read a file with ``ENTRIES``, some of them changed or removed; ``__`` in a name stands for a dot."""
    entries = {**ENTRIES, **{name.replace("__", "."): value for name, value in changes.items()}}
    path = directory / "model.gguf"
    path.write_bytes(GgufBytes([(key, *entry) for key, entry in entries.items() if entry]).build())
    return read_model_config(path)


@pytest.mark.parametrize("family", ("llama", "llama_tied", "qwen2", "qwen3", "mistral"))
def test_configuration_equals_that_of_the_original(tmp_path: Path, family: str) -> None:
    path = make_gguf(tmp_path, family)
    original = read_model_config(tmp_path / "hf")
    found = read_model_config(path)
    if family == "llama":
        assert isinstance(found.rope_scaling, FrequencyFactors) and len(found.rope_scaling.factors) == 32
        found = replace(found, rope_scaling=original.rope_scaling)
    assert found.rms_norm_eps == pytest.approx(original.rms_norm_eps, rel=1e-6)
    architecture = "LlamaForCausalLM" if family == "mistral" else original.architecture
    assert replace(
        found, path=original.path, tokenizer_path=original.path, rms_norm_eps=original.rms_norm_eps
    ) == replace(original, architecture=architecture)


def test_absent_keys_have_the_formats_defaults(tmp_path: Path) -> None:
    model = read(tmp_path)
    assert (model.num_kv_heads, model.head_dim, model.vocab_size) == (4, 16, 3)
    assert (model.rope_theta, model.rope_scaling, model.tie_word_embeddings) == (10000.0, None, True)
    assert (model.bos_token_id, model.eos_token_ids) == (None, (2,))
    assert model.sampling == SamplingDefaults()


def test_every_end_token_ends_an_answer(tmp_path: Path) -> None:
    model = read(
        tmp_path, tokenizer__ggml__eot_token_id=(UINT32, 0), tokenizer__ggml__eom_token_id=(UINT32, 1)
    )
    assert model.eos_token_ids == (0, 1, 2)


def test_recommended_sampling_parameters_are_read(tmp_path: Path) -> None:
    model = read(tmp_path, general__sampling__temp=(FLOAT32, 0.5), general__sampling__top_k=(UINT32, 20))
    assert model.sampling == SamplingDefaults(temperature=0.5, top_k=20)


@pytest.mark.parametrize(
    "changes",
    [
        {"llama__rope__scaling__type": (STRING, "linear"), "llama__rope__scaling__factor": (FLOAT32, 4.0)},
        {"llama__rope__scale_linear": (FLOAT32, 4.0)},
    ],
)
def test_linear_scaling_is_read_in_both_spellings(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert read(tmp_path, **changes).rope_scaling == LinearScaling(4.0)


@pytest.mark.parametrize(
    ("changes", "factor"),
    [
        ({"llama__rope__scaling__factor": (FLOAT32, 4.0)}, 4.0),
        (
            {"llama__rope__scaling__factor": (FLOAT32, 4.0), "llama__rope__scale_linear": (FLOAT32, 2.0)},
            4.0,
        ),
        (
            {"llama__rope__scaling__type": (STRING, "linear"), "llama__rope__scale_linear": (FLOAT32, 2.0)},
            2.0,
        ),
    ],
)
def test_scaling_without_a_type_is_linear(tmp_path: Path, changes: dict[str, Any], factor: float) -> None:
    assert read(tmp_path, **changes).rope_scaling == LinearScaling(factor)


@pytest.mark.parametrize(
    "changes",
    [
        {"llama__rope__scaling__type": (STRING, "none"), "llama__rope__scaling__factor": (FLOAT32, 4.0)},
        {"llama__rope__scaling__factor": (FLOAT32, 0.0)},
        {"llama__rope__scaling__factor": (FLOAT32, 1.0)},
    ],
)
def test_scaling_of_none_or_by_one_is_none(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert read(tmp_path, **changes).rope_scaling is None


def test_yarn_equals_that_of_a_config_json(tmp_path: Path) -> None:
    yarn = {"llama__rope__scaling__type": (STRING, "yarn"), "llama__rope__scaling__factor": (FLOAT32, 4.0)}
    original = {"llama__rope__scaling__original_context_length": (UINT32, 32)}
    betas = {
        "llama__rope__scaling__yarn_beta_fast": (FLOAT32, 16.0),
        "llama__rope__scaling__yarn_beta_slow": (FLOAT32, 2.0),
    }
    path = make_model(tmp_path / "hf", "llama")
    for changes, settings in (
        ({**yarn, **original}, {"original_max_position_embeddings": 32}),
        (
            {**yarn, **original, **betas},
            {"original_max_position_embeddings": 32, "beta_fast": 16.0, "beta_slow": 2.0},
        ),
        (yarn, {"original_max_position_embeddings": 128}),
    ):
        rope = {"rope_theta": 10000.0, "rope_type": "yarn", "factor": 4.0, **settings}
        edit_json(path / "config.json", rope_parameters=rope, rope_scaling=None, max_position_embeddings=128)
        expected, found = read_model_config(path), read(tmp_path, **changes)
        assert isinstance(found.rope_scaling, YarnScaling)
        assert found.rope_scaling == expected.rope_scaling
        assert found.max_position_embeddings == expected.max_position_embeddings


def test_factors_of_the_frequencies_exclude_a_scaling(tmp_path: Path) -> None:
    def scale(writer: GGUFWriter) -> None:
        rope_factors(*[2.0] * 32)(writer)
        writer.add_rope_scaling_factor(4.0)

    with pytest.raises(ModelError, match=r"'rope_freqs\.weight' beside a scaling of the metadata"):
        read_model_config(make_gguf(tmp_path, "qwen2", edit=scale))


def test_sliding_window_is_that_of_every_layer(tmp_path: Path) -> None:
    window = "llama__attention__sliding_window"
    model = read(tmp_path, **{window: (UINT32, 64)})
    assert (model.architecture, model.sliding_windows) == ("MistralForCausalLM", (64, 64))
    assert read(tmp_path, **{window: (UINT32, 128)}).sliding_windows == (None, None)
    model = read(tmp_path, **{window: (UINT32, 0)})
    assert (model.architecture, model.sliding_windows) == ("LlamaForCausalLM", (None, None))


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_window_of_unnamed_layers_is_refused(tmp_path: Path, architecture: str) -> None:
    def changes(window: int) -> dict[str, Any]:
        own = {key.replace("llama", architecture): entry for key, entry in ENTRIES.items() if "llama" in key}
        removed: dict[str, Any] = dict.fromkeys(key for key in ENTRIES if key.startswith("llama."))
        named = {"general.architecture": (STRING, architecture)}
        return {**removed, **own, **named, f"{architecture}.attention.sliding_window": (UINT32, window)}

    assert read(tmp_path, **changes(128)).sliding_windows == (None, None)
    with pytest.raises(ModelError, match=f"'{architecture}.attention.sliding_window' is not supported"):
        read(tmp_path, **changes(64))


NEUTRAL: list[tuple[str, tuple[int, Any]]] = [
    ("llama__expert_count", (UINT32, 0)),
    ("llama__logit_scale", (FLOAT32, 0.0)),
    ("llama__attention__causal", (BOOL, True)),
    ("llama__use_parallel_residual", (BOOL, False)),
    ("llama__rope__scaling__attn_factor", (FLOAT32, 1.0)),
    ("llama__rope__scaling__finetuned", (BOOL, True)),
    ("llama__tensor_data_layout", (STRING, "Meta AI original pth")),
]


@pytest.mark.parametrize(("key", "entry"), NEUTRAL)
def test_settings_that_change_nothing_are_accepted(tmp_path: Path, key: str, entry: tuple[int, Any]) -> None:
    assert read(tmp_path, **{key: entry}) == read(tmp_path)


@pytest.mark.parametrize(
    ("key", "entry"),
    [
        ("attention.causal", (BOOL, False)),
        ("attention.sliding_window_pattern", (ARRAY, (BOOL, [True, False]))),
        ("attention.temperature_scale", (FLOAT32, 0.1)),
        ("attention.output_scale", (FLOAT32, 0.5)),
        ("attention.key_length_swa", (UINT32, 16)),
        ("rope.scaling.yarn_ext_factor", (FLOAT32, 1.0)),
        ("rope.scaling.yarn_attn_factor", (FLOAT32, 2.0)),
        ("rope.scaling.attn_factor", (FLOAT32, 2.0)),
        ("rope.scaling.alpha", (FLOAT32, 1000.0)),
        ("rope.freq_base_swa", (FLOAT32, 10000.0)),
        ("rope.dimension_sections", (ARRAY, (UINT32, [8, 4, 4]))),
        ("use_parallel_residual", (BOOL, True)),
        ("a_key_of_tomorrow", (UINT32, 0)),
    ],
)
def test_unread_settings_of_the_architecture_are_refused(
    tmp_path: Path, key: str, entry: tuple[int, Any]
) -> None:
    with pytest.raises(ModelError) as caught:
        read(tmp_path, **{f"llama.{key}": entry})
    assert f"'llama.{key}' is not supported" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"general__architecture": (STRING, "gemma3")},
            "architecture 'gemma3' is not supported in a GGUF file",
        ),
        ({"general__architecture": None}, "'general.architecture' must be a string, not None"),
        ({"llama__block_count": None}, "'llama.block_count' must be a positive whole number, not None"),
        (
            {"llama__block_count": (UINT32, (1 << 32) - 1)},
            "'llama.block_count' must be at most 1024, not 4294967295",
        ),
        (
            {"llama__block_count": (UINT64, 1 << 63)},
            "'llama.block_count' must be at most 1024, not 9223372036854775808",
        ),
        ({"llama__context_length": (UINT32, 1 << 25)}, "'max_position_embeddings' must be at most 16777216"),
        ({"llama__attention__sliding_window": (INT32, -4)}, "must be a positive whole number, not -4"),
        ({"llama__attention__sliding_window": (FLOAT32, 64.5)}, "must be a positive whole number, not 64.5"),
        ({"llama__block_count": (UINT32, 0)}, "'llama.block_count' must be a positive whole number, not 0"),
        (
            {"llama__embedding_length": (STRING, "64")},
            "'llama.embedding_length' must be a positive whole number",
        ),
        (
            {"llama__attention__head_count": (ARRAY, (UINT32, [4, 2]))},
            "'llama.attention.head_count' differs from layer to layer",
        ),
        (
            {"llama__attention__layer_norm_rms_epsilon": (FLOAT32, float("nan"))},
            "'llama.attention.layer_norm_rms_epsilon' must be a number",
        ),
        (
            {"llama__rope__dimension_count": (UINT32, 8)},
            "'llama.rope.dimension_count' must be 16, the size of a head",
        ),
        ({"llama__attention__value_length": (UINT32, 32)}, "'llama.attention.value_length' must be 16"),
        ({"llama__expert_count": (UINT32, 8)}, "'llama.expert_count' is not supported"),
        ({"llama__logit_scale": (FLOAT32, 0.25)}, "'llama.logit_scale' is not supported"),
        (
            {
                "llama__rope__scaling__type": (STRING, "longrope"),
                "llama__rope__scaling__factor": (FLOAT32, 4.0),
            },
            "rope type 'longrope' is not supported",
        ),
        ({"tokenizer__ggml__eos_token_id": (UINT32, 3)}, "must be a token of the vocabulary, not 3"),
        (
            {"tokenizer__ggml__tokens": None, "tokenizer__ggml__eos_token_id": None},
            "'llama.vocab_size' must be",
        ),
        ({"split__count": (UINT32, 3)}, "is one of 3 parts of a model"),
    ],
)
def test_unsupported_metadata_is_refused_by_its_key(
    tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ModelError) as caught:
        read(tmp_path, **changes)
    assert problem in str(caught.value) and "model.gguf" in str(caught.value)


def test_long_strings_are_cut_in_messages(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="architecture 'aaa") as caught:
        read(tmp_path, general__architecture=(STRING, "a" * 100_000))
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("kind", "dtype"), [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16"), ("Q4_K", "bfloat16")]
)
def test_dtype_is_that_of_the_matrices(tmp_path: Path, kind: str, dtype: str) -> None:
    assert read_model_config(make_gguf(tmp_path, kind=kind)).dtype == dtype


def rope_factors(*values: float) -> Callable[[GGUFWriter], None]:
    return lambda writer: writer.add_tensor("rope_freqs.weight", np.array(values, np.float32))


def test_factors_of_the_rotary_frequencies_are_checked(tmp_path: Path) -> None:
    short = make_gguf(tmp_path / "a", "qwen2", edit=rope_factors(1.0, 2.0))
    with pytest.raises(ModelError, match=r"'rope_freqs.weight' must be F32 of 32 elements, not F32 of \[2\]"):
        read_model_config(short)
    zero = make_gguf(tmp_path / "b", "qwen2", edit=rope_factors(*([1.0] * 31), 0.0))
    with pytest.raises(ModelError, match="must be above 0"):
        read_model_config(zero)


def test_file_is_found_by_path_by_uri_and_by_its_directory(tmp_path: Path) -> None:
    path = make_gguf(tmp_path)
    for model in (str(path), f"file://{path}", str(tmp_path)):
        assert locate(Config(model=model)) == path
    assert resolve(Config(model=str(path), device="cpu"))[0].served_model_name == "tiny-F32"


def test_directory_is_no_gguf_file_and_case_does_not_matter(tmp_path: Path) -> None:
    directory = make_model(tmp_path / "model.gguf")
    config, model = resolve(Config(model=str(directory), device="cpu", load_format="safetensors"))
    assert model.path == directory and config.load_format == "safetensors"
    path = make_gguf(tmp_path / "other")
    assert read_model_config(path.rename(path.with_suffix(".GGUF"))).vocab_size == model.vocab_size


def test_load_format_safetensors_is_refused_for_a_gguf_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--load-format safetensors: .*tiny-F32\.gguf is a GGUF file"):
        resolve(Config(model=str(make_gguf(tmp_path)), device="cpu", load_format="safetensors"))


def test_quantized_file_can_be_quantized_to_fp8_or_left_alone(tmp_path: Path) -> None:
    path = make_gguf(tmp_path, kind="Q8_0")
    for given, chosen in (("auto", "none"), ("none", "none"), ("fp8", "fp8")):
        config, _ = resolve(Config(model=str(path), device="cpu", quantization=given))  # type: ignore[arg-type]
        assert config.quantization == chosen
