"""The chat formatter writes parsed output: content, reasoning and tool calls."""

import json
from typing import Any

import pytest
from marker_parser import CALLS, MODEL, TEXT, MarkerParser
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from skiff_runtime.api.formats.chat_completions import ChatResponseFormatter
from skiff_runtime.api.formats.request_spec import ChoiceOutput
from skiff_runtime.messages import FinishReason, TextLogprobs, TokenText, Usage


def format_full(text: str, finish: FinishReason = FinishReason.STOP) -> Any:
    response = ChatResponseFormatter(MODEL, None, make_parser=MarkerParser)
    body = response.format_full(
        [response.make_choice_formatter(0).format_full(ChoiceOutput(text, [], [], [], finish))],
        Usage(1, 1, 0),
    )
    return ChatCompletion.model_validate_json(body).choices[0]


def format_stream(
    texts: list[str], finish: FinishReason = FinishReason.STOP, logprobs: TextLogprobs | None = None
) -> list[Any]:
    response = ChatResponseFormatter(MODEL, None, make_parser=MarkerParser)
    choice = response.make_choice_formatter(0)
    data = choice.format_opening() + b"".join(choice.format_delta(text, 5, logprobs) for text in texts)
    data += choice.format_closing(finish) + response.format_ending(Usage(1, 1, 0))
    *events, done, rest = data.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [ChatCompletionChunk.model_validate(json.loads(each[6:])).choices[0] for each in events]


def test_full_response_has_content_reasoning_and_calls() -> None:
    choice = format_full(TEXT)
    assert choice.message.content == " yes  bye "
    assert choice.message.reasoning_content == "why not"
    calls = [
        (call.id, call.type, call.function.name, call.function.arguments)
        for call in choice.message.tool_calls
    ]
    assert calls == [(f"call-{n}", "function", *call) for n, call in enumerate(CALLS)]
    assert choice.finish_reason == "tool_calls"


def test_full_response_of_calls_alone_has_no_content() -> None:
    message = format_full("#sum:1;").message
    assert message.content is None and message.reasoning_content is None and len(message.tool_calls) == 1


def test_full_response_without_calls_is_content() -> None:
    choice = format_full("hello")
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (
        "hello",
        None,
        "stop",
    )


@pytest.mark.parametrize("size", [1, 3, 100])
def test_stream_has_the_same_parts_however_the_text_is_cut(size: int) -> None:
    choices = format_stream([TEXT[start : start + size] for start in range(0, len(TEXT), size)])
    assert choices[0].delta.role == "assistant"
    assert "".join(choice.delta.content or "" for choice in choices) == " yes  bye "
    assert "".join(getattr(choice.delta, "reasoning_content", "") for choice in choices) == "why not"
    calls: dict[int, list[Any]] = {}
    for choice in choices:
        for part in choice.delta.tool_calls or ():
            calls.setdefault(part.index, []).append(part)
    for index, (name, arguments) in enumerate(CALLS):
        first, *others = calls[index]
        assert (first.id, first.type, first.function.name) == (f"call-{index}", "function", name)
        assert "".join(part.function.arguments for part in calls[index]) == arguments
        assert all(part.id is None and part.function.name is None for part in others)
    assert [choice.finish_reason for choice in choices][-2:] == [None, "tool_calls"]


def test_held_back_text_comes_before_the_finish_reason() -> None:
    *_, held, last = format_stream(["#su", "m"], FinishReason.LENGTH)
    assert (held.delta.content, last.finish_reason) == ("unfinished sum", "length")
    assert format_full("#sum", FinishReason.LENGTH).message.content == "unfinished sum"


def test_truncated_call_has_finish_reason_length() -> None:
    assert format_stream(["#sum:1"], FinishReason.LENGTH)[-1].finish_reason == "length"
    assert format_full("#sum:1", FinishReason.TIMEOUT).finish_reason == "length"


def test_each_token_has_its_logprobs_once() -> None:
    """Even if its text is held back or becomes several deltas."""
    logprobs = TextLogprobs(0, TokenText(5, b"x", -1.0), [])
    choices = format_stream(["#su", "m:1;yes", "!"], logprobs=logprobs)
    counts = [len(choice.logprobs.content) for choice in choices if choice.logprobs]
    assert counts == [1, 1, 1]
