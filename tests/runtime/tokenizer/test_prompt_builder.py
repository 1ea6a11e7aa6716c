"""Prompt builder: token ids as in transformers, checked against the vocabulary and the context."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_tokenizer import BOS_ID, VOCAB_SIZE, write_tokenizer
from transformers import AutoTokenizer

from skiff_runtime.errors import ContextTooLong, InvalidRequest, RequestError
from skiff_runtime.messages import (
    ChatPrompt,
    GenerateRequest,
    PromptOptions,
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
    builder: PromptBuilder, prompt: str | list[int] | ChatPrompt, max_tokens: int = 4, **options: Any
) -> GenerateRequest:
    sampling = SamplingSpec(max_tokens=max_tokens, seed=1)
    request = TokenizeRequest(7, prompt, sampling, TextOptions(), options=PromptOptions(**options))
    return builder.build(request)


def ids(request: GenerateRequest) -> list[int]:
    return [int(token) for token in np.frombuffer(request.token_ids, dtype=Wire.TOKEN)]


def test_chat_has_one_bos(builder: PromptBuilder, directory: Path) -> None:
    reference: Any = AutoTokenizer.from_pretrained(directory)
    found = ids(build(builder, ChatPrompt(CHAT)))
    assert found == reference.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert found.count(BOS_ID) == 1


def test_text_has_one_bos(builder: PromptBuilder, directory: Path) -> None:
    reference: Any = AutoTokenizer.from_pretrained(directory)
    found = ids(build(builder, "The small boat 🙂"))
    assert found == reference("The small boat 🙂")["input_ids"]
    assert found.count(BOS_ID) == 1


@pytest.mark.parametrize(("prompt", "default"), [("The small boat", True), (ChatPrompt(CHAT), False)])
def test_special_tokens_are_added_on_request(
    builder: PromptBuilder, prompt: str | ChatPrompt, default: bool
) -> None:
    usual = ids(build(builder, prompt))
    assert ids(build(builder, prompt, add_special_tokens=default)) == usual
    other = ids(build(builder, prompt, add_special_tokens=not default))
    assert other == (usual[1:] if default else [BOS_ID, *usual])


@pytest.mark.parametrize(
    ("limit", "max_tokens", "kept"),
    [(3, 4, 3), (200, 4, 100), (-1, 4, CONTEXT - 4), (-1, 0, CONTEXT - 1)],
)
def test_prompt_is_truncated_to_its_last_tokens(
    builder: PromptBuilder, limit: int, max_tokens: int, kept: int
) -> None:
    large = PromptBuilder(builder.template, builder.encoder, 200 if limit == 200 else CONTEXT)
    prompt = [number % VOCAB_SIZE for number in range(100)][: CONTEXT if limit == 3 else 100]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Encoder, "check_token_ids", lambda _, token_ids: np.array(token_ids, np.int32))
        assert ids(build(large, prompt, max_tokens, truncate_prompt_tokens=limit)) == prompt[-kept:]


def test_bad_words_become_sequences_at_the_beginning_and_after_a_blank(builder: PromptBuilder) -> None:
    words = build(builder, "x", bad_words=(" boat", "東", "boat")).sampling.bad_words
    texts = [builder.encoder.decode(list(word)) for word in words]
    assert texts == ["boat", " boat", "東", " 東"]
    with pytest.raises(InvalidRequest, match="a word without a token"):
        build(builder, "x", bad_words=(" ",))
    with pytest.raises(InvalidRequest, match="send at most 1024"):
        build(builder, "x", bad_words=tuple(f"{number:064}" for number in range(100)))


def test_template_without_bos_gets_none(builder: PromptBuilder) -> None:
    plain = PromptBuilder(ChatTemplate("{{ messages[0].content }}", {}), builder.encoder, CONTEXT)
    assert BOS_ID not in ids(build(plain, ChatPrompt(CHAT)))


def test_token_ids_are_used_unchanged(builder: PromptBuilder) -> None:
    assert ids(build(builder, [5, 5, VOCAB_SIZE - 1])) == [5, 5, VOCAB_SIZE - 1]


def test_max_tokens_zero_is_left_to_the_scheduler(builder: PromptBuilder) -> None:
    assert build(builder, [5] * (CONTEXT - 1), 0).sampling.max_tokens == 0
    assert build(builder, [5] * (CONTEXT - 1), 1).sampling.max_tokens == 1


def test_larger_max_tokens_is_left_to_the_scheduler_if_it_shall_fit(builder: PromptBuilder) -> None:
    sampling = SamplingSpec(max_tokens=10 * CONTEXT, seed=1, fits_context=True)
    request = TokenizeRequest(7, [5] * (CONTEXT - 1), sampling, TextOptions())
    assert builder.build(request).sampling == sampling
    with pytest.raises(ContextTooLong, match="shorten the prompt"):
        builder.build(TokenizeRequest(7, [5] * CONTEXT, sampling, TextOptions()))


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
            f"token id {VOCAB_SIZE} at position 2 .* vocabulary .0 to {VOCAB_SIZE - 1}.",
        ),
        ([-1], 1, InvalidRequest, "token id -1 at position 0"),
        ([2**70], 1, InvalidRequest, "does not fit into 64 bits"),
        ("half \ud83d", 1, InvalidRequest, "surrogate"),
        (ChatPrompt([{"role": "robot", "content": "x"}]), 1, InvalidRequest, "unknown role robot"),
        (ChatPrompt([{"role": "user", "content": "x " * 99}]), 1, ContextTooLong, "shorten the prompt"),
    ],
)
def test_invalid_and_too_long_prompts_are_refused(
    builder: PromptBuilder,
    prompt: str | list[int] | ChatPrompt,
    max_tokens: int,
    kind: type[RequestError],
    says: str,
) -> None:
    with pytest.raises(kind, match=says) as caught:
        build(builder, prompt, max_tokens)
    assert caught.value.status == 400
