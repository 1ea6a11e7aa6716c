"""Files of sentence-transformers, and checkpoints without an output head."""

import json
from pathlib import Path
from typing import Any

import pytest
from embedding_models import QUERY_PROMPT, make_embedding_model, write_embedding_files
from tiny_config import write_config
from tiny_models import edit_json, make_model

from skiff_runtime.config import Config
from skiff_runtime.errors import ConfigError, ModelError
from skiff_runtime.messages import PoolingKind
from skiff_runtime.models.config import read_model_config
from skiff_runtime.models.scoring import choose_rerank_template
from skiff_runtime.processes.resolve import resolve


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_config(tmp_path)
    return tmp_path


def test_model_without_files_pools_its_last_token(model: Path) -> None:
    config = read_model_config(model)
    assert not config.embedding_only and config.embedding.pooling is PoolingKind.LAST
    assert config.embedding.normalize and config.embedding.dimensions is None
    assert config.embedding.size == config.hidden_size and not config.embedding.prompts


def test_files_name_pooling_normalization_and_prompts(model: Path) -> None:
    write_embedding_files(model, mode="mean", normalize=False, default_prompt="query")
    found = read_model_config(model).embedding
    assert (found.pooling, found.normalize, found.unsupported) == (PoolingKind.MEAN, False, "")
    assert found.default_prompt == QUERY_PROMPT and found.add_prompt("x", "document") == "x"
    (model / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode": "lasttoken"}))
    assert read_model_config(model).embedding.pooling is PoolingKind.LAST


@pytest.mark.parametrize("mode", ["cls_token", "max"])
def test_unsupported_pooling_is_an_error_unless_it_is_replaced(model: Path, mode: str) -> None:
    edit_json(model / "config.json", architectures=["LlamaModel"])
    write_embedding_files(model, mode=mode)
    found = read_model_config(model).embedding
    assert "supported are lasttoken and mean" in found.unsupported
    assert found.with_pooling_type("mean").pooling is PoolingKind.MEAN
    assert not found.with_pooling_type("mean").unsupported


def test_unreadable_pooling_does_not_keep_a_chat_model_from_starting(model: Path) -> None:
    write_embedding_files(model)
    (model / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode_lasttoken": 1}))
    assert "must be true or false" in read_model_config(model).embedding.unsupported
    (model / "modules.json").write_text(json.dumps([{"path": "pooling/", "type": "x.Pooling"}]))
    assert "pooling/config.json" in read_model_config(model).embedding.unsupported


@pytest.mark.parametrize("fields", [{"is_causal": False}, {"use_bidirectional_attention": True}])
def test_bidirectional_attention_is_refused(model: Path, fields: dict[str, bool]) -> None:
    edit_json(model / "config.json", **fields)
    with pytest.raises(ModelError, match="bidirectional"):
        read_model_config(model)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("modules.json", {}, "must contain a list"),
        ("modules.json", [{"path": "../other", "type": "x.Pooling"}], "is not a plain folder name"),
        ("modules.json", [{"path": "..", "type": "x.Pooling"}], "is not a plain folder name"),
        ("config_sentence_transformers.json", {"prompts": {"a": 5}}, "must be a string"),
        ("config_sentence_transformers.json", {"default_prompt_name": "q"}, "not among the prompts"),
        ("config_sentence_transformers.json", {"prompts": {"a": "x" * 20_000}}, "is longer than"),
    ],
)
def test_malformed_file_is_named(model: Path, file: str, content: Any, words: str) -> None:
    write_embedding_files(model)
    (model / file).write_text(json.dumps(content))
    with pytest.raises(ModelError, match=words) as raised:
        read_model_config(model)
    assert file.rpartition("/")[2] in str(raised.value)


def test_matryoshka_keys_restrict_dimensions(model: Path) -> None:
    edit_json(model / "config.json", is_matryoshka=False)
    assert read_model_config(model).embedding.dimensions == ()
    edit_json(model / "config.json", matryoshka_dimensions=[32, 16])
    assert read_model_config(model).embedding.dimensions == (16, 32)
    edit_json(model / "config.json", matryoshka_dimensions=[0])
    with pytest.raises(ModelError, match="'matryoshka_dimensions' must be a list of numbers from 1 to 64"):
        read_model_config(model)


def test_names_of_tensors_decide_about_the_output_head(tmp_path: Path) -> None:
    headless = make_embedding_model(tmp_path)
    config = read_model_config(headless)
    assert config.embedding_only and config.architecture == "Qwen3ForCausalLM" and config.tie_word_embeddings
    whole = make_model(tmp_path / "other", "qwen3")
    write_embedding_files(whole)
    assert not read_model_config(whole).embedding_only
    edit_json(headless / "config.json", architectures=["Qwen3Model"])
    assert read_model_config(headless).embedding_only


def test_options_that_a_headless_model_cannot_serve_are_refused(tmp_path: Path) -> None:
    headless = make_embedding_model(tmp_path, mode="cls_token")
    with pytest.raises(ConfigError, match="--pooling-type last or mean"):
        resolve(Config(model=str(headless)))
    with pytest.raises(ConfigError, match="has no output head"):
        resolve(Config(model=str(headless), pooling_type="last", rerank_template="qwen3"))


@pytest.mark.parametrize(
    ("name", "option", "expected"),
    [
        ("hf://Qwen/Qwen3-Reranker-0.6B", "auto", "qwen3"),
        ("hf://Qwen/Qwen3-Reranker-0.6B@refs/pr/3", "auto", "qwen3"),
        ("/cache/models--Qwen--Qwen3-Reranker-0.6B/snapshots/abc", "auto", "qwen3"),
        ("hf://Qwen/Qwen3-0.6B", "auto", None),
        ("hf://Qwen/Qwen3-Reranker-0.6B", "none", None),
        ("/model", "qwen3", "qwen3"),
    ],
)
def test_name_of_the_model_chooses_the_rerank_template(
    model: Path, name: str, option: Any, expected: str | None
) -> None:
    edit_json(model / "config.json", architectures=["Qwen3ForCausalLM"])
    config = Config(model=name, rerank_template=option)
    assert choose_rerank_template(config, read_model_config(model)) == expected
