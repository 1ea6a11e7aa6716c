"""Prompts become token ids as transformers makes them, within the vocabulary and the context."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_tokenizer import BOS_ID, VOCAB_SIZE, write_tokenizer
from transformers import AutoTokenizer

from skiff_runtime.errors import ContextTooLong, InvalidRequest, ModelError, RequestError
from skiff_runtime.messages import (
    ChatPrompt,
    GenerateRequest,
    SamplingSpec,
    TextOptions,
    TokenizeRequest,
    Wire,
)
from skiff_runtime.tokenizer.prompt_builder import PromptBuilder
from skiff_runtime.vocabulary.chat_template import ChatTemplate
from skiff_runtime.vocabulary.encoder import Encoder, load_tokenizer
from skiff_runtime.vocabulary.tokenizer_files import read_tokenizer_files

CONTEXT = 64
CHAT = [{"role": "user", "content": "Grüße, 東京 🙂"}]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def builder(directory: Path) -> PromptBuilder:
    files = read_tokenizer_files(directory)
    encoder = Encoder(load_tokenizer(files.tokenizer), vocab_size=VOCAB_SIZE, max_model_len=CONTEXT)
    return PromptBuilder(ChatTemplate(files.template, files.special_tokens), encoder, CONTEXT)


def build(
    builder: PromptBuilder, prompt: str | list[int] | ChatPrompt, max_tokens: int = 4
) -> GenerateRequest:
    sampling = SamplingSpec(max_tokens=max_tokens, seed=1)
    return builder.build(TokenizeRequest(uid=7, prompt=prompt, sampling=sampling, text=TextOptions()))


def ids(request: GenerateRequest) -> list[int]:
    return [int(token) for token in np.frombuffer(request.token_ids, dtype=Wire.TOKEN)]


def test_a_chat_has_one_bos(builder: PromptBuilder, directory: Path) -> None:
    oracle: Any = AutoTokenizer.from_pretrained(directory)
    found = ids(build(builder, ChatPrompt(CHAT)))
    assert found == oracle.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert found.count(BOS_ID) == 1


def test_a_text_has_one_bos(builder: PromptBuilder, directory: Path) -> None:
    oracle: Any = AutoTokenizer.from_pretrained(directory)
    found = ids(build(builder, "The small boat 🙂"))
    assert found == oracle("The small boat 🙂")["input_ids"]
    assert found.count(BOS_ID) == 1


def test_a_template_that_writes_no_bos_gets_none(builder: PromptBuilder) -> None:
    plain = PromptBuilder(ChatTemplate("{{ messages[0].content }}", {}), builder.encoder, CONTEXT)
    assert BOS_ID not in ids(build(plain, ChatPrompt(CHAT)))


def test_token_ids_are_taken_as_they_come(builder: PromptBuilder) -> None:
    assert ids(build(builder, [5, 5, VOCAB_SIZE - 1])) == [5, 5, VOCAB_SIZE - 1]


def test_saved_truncation_and_padding_are_undone(directory: Path, tmp_path: Path) -> None:
    saved = load_tokenizer(directory / "tokenizer.json")
    saved.enable_truncation(2)
    saved.enable_padding(length=50)
    saved.save(str(tmp_path / "tokenizer.json"))
    plain = load_tokenizer(directory / "tokenizer.json").encode("The small boat").ids
    assert load_tokenizer(tmp_path / "tokenizer.json").encode("The small boat").ids == plain


def test_max_tokens_zero_is_left_to_the_scheduler(builder: PromptBuilder) -> None:
    assert build(builder, [5] * (CONTEXT - 1), 0).sampling.max_tokens == 0
    assert build(builder, [5] * (CONTEXT - 1), 1).sampling.max_tokens == 1


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "kind", "says"),
    [
        ([5] * CONTEXT, 0, ContextTooLong, "the prompt has 64 tokens, but the model's context holds 64"),
        ([5] * 60, 5, ContextTooLong, "60 tokens of prompt and 5 of output .* at most 4 tokens"),
        ("a" * 10**6, 1, ContextTooLong, "1000000 characters"),
        ([], 1, InvalidRequest, "prompt is empty"),
        (
            [1, 2, VOCAB_SIZE],
            1,
            InvalidRequest,
            f"token id {VOCAB_SIZE} at position 2 .* from 0 to {VOCAB_SIZE - 1}",
        ),
        ([-1], 1, InvalidRequest, "token id -1 at position 0"),
        ([2**70], 1, InvalidRequest, "does not fit 64 bits"),
        ("half \ud83d", 1, InvalidRequest, "surrogate"),
        (ChatPrompt([{"role": "robot", "content": "x"}]), 1, InvalidRequest, "unknown role robot"),
        (ChatPrompt([{"role": "user", "content": "x " * 99}]), 1, ContextTooLong, "shorten the prompt"),
    ],
)
def test_prompts_that_cannot_be_served(
    builder: PromptBuilder,
    prompt: str | list[int] | ChatPrompt,
    max_tokens: int,
    kind: type[RequestError],
    says: str,
) -> None:
    with pytest.raises(kind, match=says) as caught:
        build(builder, prompt, max_tokens)
    assert caught.value.status == 400


def test_files_in_all_their_spellings(tmp_path: Path) -> None:
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
def test_malformed_files_are_named(tmp_path: Path, name: str, text: str, says: str) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / name).write_text(text)
    with pytest.raises(ModelError, match=says):
        read_tokenizer_files(tmp_path)


def test_a_model_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json does not exist"):
        read_tokenizer_files(tmp_path)
