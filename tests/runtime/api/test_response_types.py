"""Every response and event has the types of the openai package, validated without coercion."""

import json
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from skiff_runtime.api.formats.chat_completions import prepare_chat
from skiff_runtime.api.formats.completions import prepare_completion
from skiff_runtime.api.formats.generate import prepare_generate
from skiff_runtime.api.formats.request_spec import ChoiceOutput, RequestSpec
from skiff_runtime.api.formats.served_model import ServedModel
from skiff_runtime.api.parsing.hermes import HERMES
from skiff_runtime.api.parsing.output_format import REASONING_EFFORTS, OutputFormat
from skiff_runtime.api.parsing.reasoning_parser import ReasoningStart
from skiff_runtime.errors import InvalidRequest
from skiff_runtime.messages import FinishReason, StreamOpened, TextLogprobs, TextOptions, TokenText, Usage
from skiff_runtime.models.config import SamplingDefaults

STARTS: Any = {None: ReasoningStart.OPTIONAL} | {
    ("reasoning_effort", effort): ReasoningStart.OPTIONAL for effort in REASONING_EFFORTS
}
MODEL = ServedModel(
    name="m",
    fingerprint="fp_0",
    vocab_size=9,
    max_model_len=64,
    defaults=SamplingDefaults(),
    output_format=OutputFormat(HERMES, reasoning_starts=STARTS),
)
TOOLS = [{"type": "function", "function": {"name": "f"}}]
TEXTS = {
    "plain": "Yes. 🙂",
    "calls": 'Wait.<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>' * 2,
    "reasoning": "<think>hm</think>Yes.",
    "cut": '<tool_call>{"name": "f", "arguments": {"a',
    "empty": "",
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"n": 2},
    {"return_token_ids": True},
    {"stream_options": {"include_usage": True}},
    {"stream_options": {"continuous_usage_stats": True}},
]
USAGE = Usage(3, 2, 1)
LOGPROBS = TextLogprobs(
    0, TokenText(5, b"x", -0.5), [TokenText(5, b"x", -0.5), TokenText(6, b"\xf0", float("-inf"))]
)


def stream(spec: RequestSpec, text: str, logprobs: TextLogprobs | None, finish: FinishReason) -> list[bytes]:
    """Return the data of the events of a stream in which each character is a token."""
    formatter = spec.formatter
    data = b""
    for index in range(spec.num_choices):
        choice = formatter.make_choice_formatter(index)
        formatter.start_choice(
            index, StreamOpened(index, 3, 1, TextOptions(), prompt_token_ids=b"\x05\0\0\0")
        )
        data += choice.format_opening()
        data += b"".join(choice.format_delta(each, 5, logprobs) for each in text)
        data += choice.format_closing(finish)
    *events, done, rest = (data + formatter.format_ending(USAGE)).split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    return [event.removeprefix(b"data: ") for event in events]


def complete(spec: RequestSpec, text: str, logprobs: TextLogprobs | None, finish: FinishReason) -> bytes:
    """Return the body of a response that is not streamed."""
    tokens = [] if logprobs is None else [logprobs] * len(text)
    output = ChoiceOutput(text, [5] * len(text), tokens, [], finish)
    choices = [
        spec.formatter.make_choice_formatter(index).format_full(output) for index in range(spec.num_choices)
    ]
    return spec.formatter.format_full(choices, USAGE)


FINISHES = [FinishReason.STOP, FinishReason.LENGTH, FinishReason.TIMEOUT]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("logprobs", [None, LOGPROBS])
def test_chat_completions_and_their_chunks(text: str, logprobs: TextLogprobs | None) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": TOOLS}
    for options, finish in product(OPTIONS, FINISHES):
        raw = json.dumps({**body, **options, "stream": True}).encode()
        events = stream(prepare_chat(raw, MODEL), TEXTS[text], logprobs, finish)
        chunks = [ChatCompletionChunk.model_validate_json(event, strict=True) for event in events]
        called = any(choice.delta.tool_calls for chunk in chunks for choice in chunk.choices)
        assert called == (text in ("calls", "cut"))
        options = {name: value for name, value in options.items() if name != "stream_options"}
        spec = prepare_chat(json.dumps({**body, **options}).encode(), MODEL)
        reply = ChatCompletion.model_validate_json(complete(spec, TEXTS[text], logprobs, finish), strict=True)
        assert bool(reply.choices[0].message.tool_calls) == called
        assert bool(reply.choices[0].logprobs) == (logprobs is not None and text != "empty")


@pytest.mark.parametrize("logprobs", [None, LOGPROBS])
def test_completions_and_their_chunks(logprobs: TextLogprobs | None) -> None:
    body = {"model": "m", "prompt": "x"} | ({} if logprobs is None else {"logprobs": 1})
    for options, finish in product(OPTIONS, FINISHES):
        raw = json.dumps({**body, **options, "stream": True}).encode()
        for event in stream(prepare_completion(raw, MODEL), TEXTS["plain"], logprobs, finish):
            chunk = json.loads(event)
            for choice in chunk["choices"]:
                # The package has no type of its own for chunks, whose reason is null until the last one.
                choice["finish_reason"] = choice["finish_reason"] or "stop"
            Completion.model_validate_json(json.dumps(chunk), strict=True)
        options = {name: value for name, value in options.items() if name != "stream_options"}
        spec = prepare_completion(json.dumps({**body, **options}).encode(), MODEL)
        Completion.model_validate_json(complete(spec, TEXTS["plain"], logprobs, finish), strict=True)


def test_strict_servers_refuse_hints_on_every_endpoint() -> None:
    strict = replace(MODEL, is_strict=True)
    chat = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    for prepare, body in (
        (prepare_chat, {**chat, "metadata": {"a": "b"}}),
        (prepare_completion, {"model": "m", "prompt": "x", "store": True}),
        (prepare_generate, {"text": "x", "rid": "a"}),
    ):
        raw = json.dumps(body).encode()
        prepare(raw, MODEL)
        with pytest.raises(InvalidRequest, match="not supported with --strict"):
            prepare(raw, strict)
