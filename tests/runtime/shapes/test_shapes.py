"""Shapes of well-known models, with which benchmarks run without a download."""

from pathlib import Path

import pytest

from skiff_runtime import shapes
from skiff_runtime.config import Config
from skiff_runtime.errors import ConfigError
from skiff_runtime.models.config import read_model_config
from skiff_runtime.models.footprint import count_parameters
from skiff_runtime.processes.launch import Launch
from skiff_runtime.processes.resolve import resolve
from skiff_runtime.tokenizer.detokenizer import load_decoder
from skiff_runtime.vocabulary.byte_level import read_byte_level_decoder

BILLIONS = {
    "llama-3.1-8b": 8.03,
    "mixtral-8x7b": 46.70,
    "qwen3-0.6b": 0.596,
    "qwen3-14b": 14.77,
    "qwen3-235b-a22b": 235.09,
    "qwen3-30b-a3b": 30.53,
    "qwen3-32b": 32.76,
    "qwen3-8b": 8.19,
}
"""Billions of parameters, as published."""


@pytest.mark.parametrize("name", shapes.names())
def test_number_of_parameters_equals_the_published_one(name: str) -> None:
    model = read_model_config(shapes.find(shapes.SCHEME + name))
    assert count_parameters(model).total / 1e9 == pytest.approx(BILLIONS[name], rel=0.002)


def test_names_lists_all_shapes() -> None:
    assert shapes.names() == sorted(BILLIONS)


def test_shape_is_served_with_random_weights_only() -> None:
    config, model = resolve(Config(model="shape://qwen3-0.6b", load_format="dummy", device="cpu"))
    assert model.num_layers == 28 and config.served_model_name == "qwen3-0.6b"
    with pytest.raises(ConfigError, match="add --load-format dummy"):
        resolve(Config(model="shape://qwen3-0.6b"))
    with pytest.raises(ConfigError, match=r"no such shape; known shapes are llama-3\.1-8b, mixtral"):
        resolve(Config(model="shape://gpt-9", load_format="dummy"))


def test_tokenizer_has_all_bytes_and_no_text_for_other_ids() -> None:
    path: Path = shapes.find("shape://qwen3-14b") / "tokenizer.json"
    decoder = read_byte_level_decoder(path)
    assert decoder is not None
    stream = decoder.stream(skip_special_tokens=True)
    assert "".join(map(stream.push, [*"Grüße".encode(), 151_000])) + stream.flush() == "Grüße"


def test_decoder_has_text_for_all_ids_of_random_weights() -> None:
    config, model = resolve(Config(model="shape://qwen3-0.6b", load_format="dummy", device="cpu"))
    stream = load_decoder(Launch(config=config, model=model, run_dir=Path())).stream(skip_special_tokens=True)
    assert [stream.push(token) for token in (65, 256, model.vocab_size - 1)] == ["A", " 256", " 151935"]
