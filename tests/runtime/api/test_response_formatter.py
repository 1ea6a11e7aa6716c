"""The formatter of the Responses API: items and events, checked against OpenAI's own types in strict mode."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from marker_parser import MODEL, TEXT, MarkerParser
from response_events import check_response, check_stream, shape

from skiff_runtime.api.formats.request_spec import ChoiceOutput
from skiff_runtime.api.formats.response_tools import OfferedTool, ToolSet
from skiff_runtime.api.formats.responses import ResponseFormatter, describe_request
from skiff_runtime.api.parsing.deltas import MakeOutputParser
from skiff_runtime.api.schemas.responses_request import CustomTool, ResponsesFunctionTool, ResponsesRequest
from skiff_runtime.errors import InternalError, InvalidRequest, QueueFull, RequestError
from skiff_runtime.messages import NO_TOKEN, FinishReason, RequestFailed, TextLogprobs, TokenText, Usage

USAGE = Usage(5, 9, 2)
BODY = ResponsesRequest.model_validate({"model": "m", "input": "x"})


class Formatted:
    """A formatter, and the responses that it stored."""

    def __init__(
        self, *, is_streaming: bool, make_parser: MakeOutputParser | None = MarkerParser, **tools: OfferedTool
    ) -> None:
        self.stored: list[bytes] = []
        self.formatter = ResponseFormatter(
            describe_request(BODY, "resp_1", MODEL.make_sampling_spec(BODY), ToolSet.from_body(BODY)),
            is_streaming=is_streaming,
            make_parser=make_parser,
            tools=tools,
            on_end=lambda body, _items: self.stored.append(body),
        )
        self.choice = self.formatter.make_choice_formatter(0)

    def push(self, pieces: Sequence[str], logprobs: Sequence[TextLogprobs | None] = ()) -> bytes:
        given = [*logprobs, *[None] * (len(pieces) - len(logprobs))]
        rows = zip(pieces, given, strict=True)
        return b"".join([self.choice.format_delta(piece, 5, each) for piece, each in rows])


def stream(
    pieces: Sequence[str],
    finish: FinishReason = FinishReason.STOP,
    logprobs: Sequence[TextLogprobs | None] = (),
    **options: Any,
) -> list[dict[str, Any]]:
    """Return the checked events of a stream whose text arrives in these pieces."""
    formatted = Formatted(is_streaming=True, **options)
    data = formatted.choice.format_opening() + formatted.push(pieces, logprobs)
    data += formatted.choice.format_delta("", NO_TOKEN, None)
    data += formatted.choice.format_closing(finish) + formatted.formatter.format_ending(USAGE)
    events = check_stream(data)
    [stored] = formatted.stored
    assert check_response(stored) == events[-1]["response"]
    return events


def whole(
    pieces: Sequence[str],
    finish: FinishReason = FinishReason.STOP,
    logprobs: Sequence[TextLogprobs | None] = (),
    **options: Any,
) -> dict[str, Any]:
    """Return the checked response that is not streamed."""
    formatted = Formatted(is_streaming=False, **options)
    assert formatted.push(pieces, logprobs) == b""
    choice = formatted.choice.format_full(ChoiceOutput("", [], [], [], finish))
    body = formatted.formatter.format_full([choice], USAGE)
    assert formatted.stored == [body]
    return check_response(body)


ITEMS = [
    ("reasoning", "completed", "why not"),
    ("message", "completed", " yes "),
    ("function_call", "completed", "sum", "1,2"),
    ("message", "completed", " bye "),
    ("function_call", "completed", "len", "3"),
]


def test_output_is_divided_into_items() -> None:
    response = whole([TEXT])
    assert shape(response["output"]) == ITEMS
    assert [item["id"].partition("_")[0] for item in response["output"]] == ["rs", "msg", "fc", "msg", "fc"]
    assert [item["call_id"] for item in response["output"] if "call_id" in item] == ["call-0", "call-1"]
    assert (response["status"], response["incomplete_details"], response["error"]) == (
        "completed",
        None,
        None,
    )
    assert response["usage"]["total_tokens"] == 14
    assert response["usage"]["input_tokens_details"]["cached_tokens"] == 2
    assert response["completed_at"] >= response["created_at"]


def cut(text: str, places: Sequence[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


@settings(max_examples=60, deadline=None)
@given(
    text=st.text("?!#:;ab ", max_size=24),
    places=st.lists(st.integers(0, 24), max_size=8),
    finish=st.sampled_from([FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT]),
)
def test_however_the_text_is_cut_the_response_is_the_same(
    text: str, places: list[int], finish: FinishReason
) -> None:
    pieces = cut(text, places)
    events = stream(pieces, finish)
    expected = shape(whole([text], finish)["output"])
    assert shape(events[-1]["response"]["output"]) == expected
    assert shape(whole(pieces, finish)["output"]) == expected


@settings(max_examples=30, deadline=None)
@given(pieces=st.lists(st.text(st.characters(codec="utf-8"), max_size=5), max_size=6))
def test_plain_text_is_one_message(pieces: list[str]) -> None:
    events = stream(pieces, make_parser=None)
    assert shape(events[-1]["response"]["output"]) == [("message", "completed", "".join(pieces))]
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert deltas == [piece for piece in pieces if piece]


@pytest.mark.parametrize(
    ("finish", "reason"),
    [
        (FinishReason.LENGTH, "max_output_tokens"),
        (FinishReason.TIMEOUT, "max_output_tokens"),
        (FinishReason.ABORT, None),
    ],
)
def test_output_that_was_cut_short_is_incomplete(finish: FinishReason, reason: str | None) -> None:
    *_, last = stream(["yes #sum:1"], finish)
    response = last["response"]
    assert (last["type"], response["status"]) == ("response.incomplete", "incomplete")
    assert response["incomplete_details"] == {"reason": reason}
    assert response["completed_at"] is None
    assert shape(response["output"]) == [
        ("message", "completed", "yes "),
        ("function_call", "incomplete", "sum", "1"),
    ]


def test_call_that_was_complete_before_the_cut_is_complete() -> None:
    [call] = whole(['#sum:{"a":1}'], FinishReason.LENGTH)["output"]
    assert (call["status"], call["arguments"]) == ("completed", '{"a":1}')


def test_complete_response_has_a_message_or_a_call() -> None:
    assert shape(whole([""])["output"]) == [("message", "completed", "")]
    assert shape(whole(["?why"])["output"]) == [
        ("reasoning", "completed", "why"),
        ("message", "completed", ""),
    ]
    assert shape(whole(["?why"], FinishReason.LENGTH)["output"]) == [("reasoning", "incomplete", "why")]


def test_calls_of_custom_tools_and_namespaces_are_mapped_back() -> None:
    patch = OfferedTool(CustomTool(type="custom", name="patch"), "files")
    close = OfferedTool(ResponsesFunctionTool(type="function", name="close"), "agents")
    tools: dict[str, Any] = {"files__patch": patch, "agents__close": close}
    text = '#files__patch:{"input":"a\\nb"};#agents__close:{};'
    for response in (whole([text], **tools), stream([text], **tools)[-1]["response"]):
        custom, function = response["output"]
        assert (custom["type"], custom["name"], custom["namespace"]) == ("custom_tool_call", "patch", "files")
        assert custom["input"] == "a\nb"
        assert (function["name"], function["namespace"]) == ("close", "agents")


def test_reasoning_tokens_are_counted() -> None:
    response = whole(["?", "why", " not", "!", "yes"])
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == 3
    response = whole(["?why", "?"], FinishReason.LENGTH)
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == 2


def _logprobs(text: str) -> TextLogprobs:
    token = TokenText(5, text.encode(), -1.0)
    return TextLogprobs(0, token, [token])


def test_each_token_of_a_message_has_its_logprobs_once() -> None:
    pieces = ["a", "", "b"]
    logprobs = [_logprobs(piece) for piece in pieces]
    for make_parser in (None, MarkerParser):
        events = stream(pieces, logprobs=logprobs, make_parser=make_parser)
        [message] = events[-1]["response"]["output"]
        found = message["content"][0]["logprobs"]
        assert [each["token"] for each in found] == pieces
        assert found[0]["top_logprobs"] == [{"token": "a", "bytes": [97], "logprob": -1.0}]
        streamed = [
            each for event in events if event["type"].endswith("text.delta") for each in event["logprobs"]
        ]
        assert streamed == found
        assert (
            whole(pieces, logprobs=logprobs, make_parser=make_parser)["output"][0]["content"]
            == message["content"]
        )


def test_logprobs_of_reasoning_are_left_out() -> None:
    pieces = ["?", "why", "!", "yes", ""]
    [_, message] = whole(pieces, logprobs=[_logprobs(piece) for piece in pieces])["output"]
    assert [each["token"] for each in message["content"][0]["logprobs"]] == ["!", "yes", ""]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InternalError("a rank died"), "server_error"),
        (QueueFull("full"), "rate_limit_exceeded"),
        (InvalidRequest("too long"), "invalid_prompt"),
    ],
)
def test_stream_that_fails_ends_with_its_error(error: RequestError, code: str) -> None:
    formatted = Formatted(is_streaming=True)
    data = formatted.choice.format_opening() + formatted.push(["yes #su", "m:1"])
    data += formatted.formatter.format_error_event(RequestFailed.of(1, error), "r1")
    *_, last = check_stream(data)
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"] == {"code": code, "message": error.message}
    assert shape(last["response"]["output"])[-1] == ("function_call", "incomplete", "sum", "1")
    assert formatted.stored == []
