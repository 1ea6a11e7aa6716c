"""The formatter of Anthropic's messages: content blocks, stop reasons, and the same message however the text is cut."""

import itertools
import json
from typing import Any

import pytest
from anthropic.types.shared import ErrorResponse
from anthropic_answers import check_message, check_stream, join_events
from hypothesis import given, settings
from hypothesis import strategies as st

from skiff_runtime.api.formats import messages
from skiff_runtime.api.formats.messages import SIGNATURE, MessageResponseFormatter
from skiff_runtime.api.formats.request_spec import ChoiceOutput
from skiff_runtime.api.formats.served_model import ServedModel
from skiff_runtime.api.http.anthropic_errors import anthropic_error_body
from skiff_runtime.api.parsing.deltas import OutputParser
from skiff_runtime.api.parsing.hermes import HERMES
from skiff_runtime.api.parsing.output_parser import ChatOutputParser
from skiff_runtime.api.parsing.reasoning_parser import ReasoningParser, ReasoningStart
from skiff_runtime.api.parsing.tool_parser import ToolCallOptions
from skiff_runtime.errors import (
    BodyTooLarge,
    DeadlineExceeded,
    Forbidden,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    QueueFull,
    RequestError,
    Unauthorized,
    Unavailable,
)
from skiff_runtime.messages import FinishReason, RequestFailed, StreamOpened, TextOptions, Usage
from skiff_runtime.models.config import SamplingDefaults

MODEL = ServedModel(name="m", fingerprint="fp_0", vocab_size=9, max_model_len=64, defaults=SamplingDefaults())
CALL = '<tool_call>\n{"name": "now", "arguments": {"zone": "Köln"}}\n</tool_call>'
TEXT = f"<think>Why \\ not?</think>\n\nLet me see. {CALL}\n{CALL}"
USAGE = Usage(prompt_tokens=9, completion_tokens=7, cached_tokens=4)
USAGE_BODY = {
    "input_tokens": 5,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 4,
    "output_tokens": 7,
}


def make_parser() -> OutputParser:
    """Make the parser of a model that reasons and calls one tool."""
    return ChatOutputParser(
        ReasoningParser(ReasoningStart.OPTIONAL), HERMES.parser(ToolCallOptions(frozenset({"now"})))
    )


def make_formatter(
    *, parse: bool = True, max_tokens: int = 7, shows_thinking: bool = True
) -> MessageResponseFormatter:
    return MessageResponseFormatter(
        MODEL,
        max_tokens=max_tokens,
        make_parser=make_parser if parse else None,
        shows_thinking=shows_thinking,
    )


def format_full(
    text: str, finish: FinishReason = FinishReason.STOP, usage: Usage = USAGE, **options: Any
) -> dict[str, Any]:
    formatter = make_formatter(**options)
    choice = formatter.make_choice_formatter(0).format_full(ChoiceOutput(text, [], [], [], finish))
    body = formatter.format_full([choice], usage)
    check_message(body)
    message: dict[str, Any] = json.loads(body)
    return message


def stream(
    pieces: list[str], finish: FinishReason = FinishReason.STOP, usage: Usage = USAGE, **options: Any
) -> bytes:
    formatter = make_formatter(**options)
    choice = formatter.make_choice_formatter(0)
    formatter.start_choice(0, StreamOpened(1, usage.prompt_tokens, usage.cached_tokens, TextOptions()))
    data = choice.format_opening() + b"".join(choice.format_delta(piece, 5, None) for piece in pieces)
    return data + choice.format_closing(finish) + formatter.format_ending(usage)


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    blocks = [{**block, "id": ""} if "id" in block else block for block in message["content"]]
    return {**message, "id": "", "content": blocks}


def test_full_response_has_a_block_for_thinking_text_and_each_call() -> None:
    message = format_full(TEXT)
    thinking, text, *calls = message["content"]
    assert thinking == {"type": "thinking", "thinking": "Why \\ not?", "signature": SIGNATURE}
    assert text == {"type": "text", "text": "Let me see."}
    assert [(call["type"], call["name"], call["input"]) for call in calls] == [
        ("tool_use", "now", {"zone": "Köln"})
    ] * 2
    assert len({call["id"] for call in calls}) == 2
    assert all(call["id"].startswith("toolu_") for call in calls)
    assert message["id"].startswith("msg_")
    assert (message["model"], message["stop_reason"], message["usage"]) == ("m", "tool_use", USAGE_BODY)


@settings(max_examples=60, deadline=None)
@given(
    text=st.sampled_from(
        [TEXT, "plain text", "", "<think>cut", f"a {CALL} b", CALL[:-30], "<tool_call>nothing"]
    ),
    cuts=st.sets(st.integers(0, len(TEXT))),
    parse=st.booleans(),
    finish=st.sampled_from([FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT]),
    shows_thinking=st.booleans(),
)
def test_stream_is_the_full_message_however_the_text_is_cut(
    text: str, cuts: set[int], parse: bool, finish: FinishReason, shows_thinking: bool
) -> None:
    options: dict[str, Any] = {"parse": parse, "shows_thinking": shows_thinking}
    bounds = [0, *sorted(cut for cut in cuts if cut <= len(text)), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(bounds)]
    events = check_stream(stream(pieces, finish, **options))
    joined, full = join_cut(events), format_full(text, finish, **options)
    assert without_ids(joined) == without_ids(full)


def join_cut(events: list[Any]) -> dict[str, Any]:
    """Join the events; the input of a call that was cut short is empty, as in a response that is not streamed."""
    try:
        return join_events(events)
    except json.JSONDecodeError:
        deltas = [event for event in events if event.type != "content_block_delta"]
        kept = [event for event in events if event in deltas or event.delta.type != "input_json_delta"]
        return join_events(kept)


def _nested(depth: int) -> str:
    return f'{{"a": {"[" * depth}{"]" * depth}}}'


@pytest.mark.parametrize("depth", [20, 5000])
def test_nested_arguments_do_not_end_the_process(depth: int) -> None:
    """Arguments nested too deeply, and those that were cut short, are no arguments."""
    for arguments in (_nested(depth), _nested(depth)[: depth + 6]):
        formatter = make_formatter()
        text = f'<tool_call>\n{{"name": "now", "arguments": {arguments}}}\n</tool_call>'
        choice = formatter.make_choice_formatter(0).format_full(
            ChoiceOutput(text, [], [], [], FinishReason.STOP)
        )
        body = formatter.format_full([choice], USAGE)
        is_whole = depth == 20 and arguments.endswith("}")
        assert (b'"input":{}' in body) is not is_whole


def test_arguments_at_the_limit_of_nesting_are_written() -> None:
    """There is a depth that can be decoded alone, and not be encoded within a message."""
    formatter = make_formatter()
    formatter.make_choice_formatter(0)
    for depth in range(500, 1100):
        block = {"type": "tool_use", "input": messages._input_json(_nested(depth))}
        assert formatter.format_full([{"content": [block]}], USAGE)


def test_stream_of_plain_text_fills_a_template() -> None:
    events = check_stream(stream(["a", "", 'b"\n', "c"], parse=False))
    assert [event.type for event in events] == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * 3,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[0].message.usage.model_dump(exclude_unset=True) == {**USAGE_BODY, "output_tokens": 0}
    assert join_events(events)["content"] == [{"type": "text", "text": 'ab"\nc'}]


def test_omitted_thinking_leaves_a_block_without_text() -> None:
    thinking, *_ = format_full(TEXT, shows_thinking=False)["content"]
    assert thinking == {"type": "thinking", "thinking": "", "signature": SIGNATURE}


@pytest.mark.parametrize(
    ("finish", "stop_string", "text", "max_tokens", "reason"),
    [
        (FinishReason.STOP, None, "x", 7, "end_turn"),
        (FinishReason.STOP, "END", "x", 7, "stop_sequence"),
        (FinishReason.STOP, None, CALL, 7, "tool_use"),
        (FinishReason.LENGTH, None, CALL, 7, "max_tokens"),
        (FinishReason.LENGTH, None, "x", 7, "max_tokens"),
        (FinishReason.LENGTH, None, "x", 8, "model_context_window_exceeded"),
        (FinishReason.TIMEOUT, None, "x", 8, "max_tokens"),
        (FinishReason.ABORT, None, "x", 8, "max_tokens"),
    ],
)
def test_stop_reason(
    finish: FinishReason, stop_string: str | None, text: str, max_tokens: int, reason: str
) -> None:
    usage = Usage(9, 7, 4, stop_string)
    full = format_full(text, finish, usage, max_tokens=max_tokens)
    assert (full["stop_reason"], full["stop_sequence"]) == (reason, stop_string)
    joined = join_events(check_stream(stream([text], finish, usage, max_tokens=max_tokens)))
    assert without_ids(joined) == without_ids(full)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InvalidRequest("x"), "invalid_request_error"),
        (Unauthorized("x"), "authentication_error"),
        (Forbidden("x"), "permission_error"),
        (ModelNotFound("x"), "not_found_error"),
        (QueueFull("x"), "rate_limit_error"),
        (InternalError("x"), "api_error"),
        (Unavailable("x"), "overloaded_error"),
        (DeadlineExceeded("x"), "timeout_error"),
    ],
)
def test_error_has_the_type_of_its_status(error: RequestError, kind: str) -> None:
    body = ErrorResponse.model_validate_json(anthropic_error_body(error, "id-1"), strict=True)
    assert (body.error.type, body.error.message, body.request_id) == (kind, "x", "id-1")


def test_too_large_body_has_the_type_that_only_the_documentation_names() -> None:
    assert json.loads(anthropic_error_body(BodyTooLarge("x"), ""))["error"]["type"] == "request_too_large"


def test_error_in_a_stream_is_its_last_event() -> None:
    failure = RequestFailed.of(1, InternalError("the rank died"))
    data = make_formatter().format_error_event(failure, "id-1")
    name, payload = data.decode().removesuffix("\n\n").split("\n")
    assert name == "event: error"
    assert ErrorResponse.model_validate_json(payload.removeprefix("data: ")).error.message == "the rank died"
