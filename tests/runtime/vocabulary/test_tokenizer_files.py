"""Tokenizer files: every spelling that models use is read, and a malformed file is named."""

import json
from pathlib import Path

import pytest
from tiny_tokenizer import write_tokenizer

from skiff_runtime.config import Config
from skiff_runtime.errors import ConfigError, ModelError
from skiff_runtime.processes.resolve import resolve
from skiff_runtime.vocabulary.byte_level import read_byte_level_decoder
from skiff_runtime.vocabulary.encoder import load_tokenizer
from skiff_runtime.vocabulary.tokenizer_files import read_tokenizer_files


def test_all_spellings_of_special_tokens_and_templates_are_read(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    config = {
        "bos_token": {"content": "<s>", "lstrip": False},
        "eos_token": "</s>",
        "pad_token": None,
        "chat_template": [
            {"name": "tool_use", "template": "tools"},
            {"name": "default", "template": "plain"},
        ],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"unk_token": "<unk>", "eos_token": "<old>"})
    )
    files = read_tokenizer_files(tmp_path)
    assert files.template == "plain"
    assert files.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (tmp_path / "chat_template.jinja").write_text("own file")
    assert read_tokenizer_files(tmp_path).template == "own file"


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("tokenizer_config.json", "{", "tokenizer_config.json is not valid JSON"),
        ("tokenizer_config.json", '{"chat_template": 5}', "'chat_template' must be a string or a list"),
        ("tokenizer_config.json", '{"chat_template": [5]}', "must have 'name' and 'template'"),
        ("tokenizer_config.json", '{"bos_token": 5}', "'bos_token' must be a string, not 5"),
    ],
)
def test_malformed_config_is_named_in_the_error(tmp_path: Path, name: str, text: str, says: str) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / name).write_text(text)
    with pytest.raises(ModelError, match=says):
        read_tokenizer_files(tmp_path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "template.jinja cannot be read: No such file or directory"),
        (b"\xff", "template.jinja is not valid UTF-8"),
        (b"{% for m in messages %}", "template.jinja: .*malformed: line 1"),
        (b"x" * ((1 << 20) + 1), "template.jinja is larger than 1 MiB"),
    ],
)
def test_chat_template_of_the_user_is_checked_before_the_start(
    tmp_path: Path, content: bytes | None, says: str
) -> None:
    path = tmp_path / "template.jinja"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="--chat-template.*" + says):
        resolve(Config(chat_template=str(path)))


def test_model_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json does not exist"):
        read_tokenizer_files(tmp_path)


def test_malformed_tokenizer_is_named_in_the_error(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text('{"model": ')
    for load in (read_byte_level_decoder, load_tokenizer):
        with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read as a tokenizer"):
            load(path)


def test_saved_truncation_and_padding_are_ignored(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    saved = load_tokenizer(tmp_path / "tokenizer.json")
    plain = saved.encode("The small boat").ids
    saved.enable_truncation(2)
    saved.enable_padding(length=50)
    saved.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path / "tokenizer.json").encode("The small boat").ids == plain
