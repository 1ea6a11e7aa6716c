"""Responses of all endpoints that compute, streamed or not, in one form that can be compared."""

import json
import math
from dataclasses import dataclass, field
from typing import Any, Final

from raw_http import Reply

LOGPROB_TOLERANCE: Final = 2e-3
"""In nats, and for embeddings and scores. Float32 sums in another order differ by a thousandth of this."""
_LAST_EVENTS: Final = {"response.completed", "response.incomplete", "response.failed", "message_stop"}
_MESSAGE_EVENTS: Final = {
    "message",
    "message_start",
    "content_block_start",
    "content_block_delta",
    "content_block_stop",
    "message_delta",
    "message_stop",
}


@dataclass(slots=True)
class Choice:
    """One choice. ``logprobs``: one for each token; ``tops``: the sorted top log-probabilities of each position.

    ``numbers``: the embedding of one input, or the score of one document.
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    logprobs: list[float] = field(default_factory=list)
    tops: list[list[float]] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    numbers: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Answer:
    """The end of a request. ``ends``: terminal events received; there must be one for each choice, or one error."""

    status: int
    error: str | None = None
    code: str | None = None
    choices: dict[int, Choice] = field(default_factory=dict)
    usage: tuple[int, int] = (0, 0)
    ends: int = 0
    cut: bool = False

    @property
    def finished(self) -> bool:
        """True for a whole answer without an error."""
        return self.error is None and not self.cut

    @property
    def terminal(self) -> bool:
        """True if the client knows how its request ended: by a whole answer or by one error."""
        if self.cut:
            return False
        return self.ends == (1 if self.error is not None else len(self.choices)) and self.ends > 0


def read_answer(reply: Reply) -> Answer:
    """Parse a response."""
    answer = Answer(reply.status)
    if reply.headers.get("content-type", "").startswith("text/event-stream"):
        _read_stream(answer, reply)
        return answer
    if not reply.whole:
        answer.cut = True
        return answer
    _take(answer, json.loads(reply.body))
    return answer


def _read_stream(answer: Answer, reply: Reply) -> None:
    """Parse a stream. One that ends neither with its last event nor with an error was cut."""
    done = False
    for block in reply.body.decode(errors="replace").split("\n\n"):
        data = block.rpartition("data: ")[2].strip() if block.startswith("event: ") else block[6:].strip()
        if data == "[DONE]":
            done = True
        elif data:
            try:
                event = json.loads(data)
            except ValueError:
                answer.cut = True
                return
            assert not done, f"an event after the end: {data[:200]}"
            done = event.get("type") in _LAST_EVENTS
            _take(answer, event)
    answer.cut = not (reply.whole and (done or answer.error is not None))


def _take(answer: Answer, event: dict[str, Any]) -> None:
    """Add a response or an event of a stream to the answer."""
    kind = event.get("type", event.get("object"))
    if (error := event.get("error")) is not None:
        answer.error, answer.code = error["message"], error.get("code")
        answer.ends += 1
    elif kind == "response":
        _take_response(answer, event)
    elif isinstance(kind, str) and kind.startswith("response."):
        _take_response_event(answer, event)
    elif kind in _MESSAGE_EVENTS:
        _take_message_event(answer, event)
    elif kind == "list" or "results" in event:
        _take_numbers(answer, event)
    else:
        _take_choices(answer, event)


def _take_choices(answer: Answer, event: dict[str, Any]) -> None:
    for choice in event.get("choices", [event]):
        _take_choice(answer, choice)
    if usage := event.get("usage"):
        answer.usage = (usage["prompt_tokens"], usage["completion_tokens"])


def _take_choice(answer: Answer, fields: dict[str, Any]) -> None:
    choice = answer.choices.setdefault(fields.get("index", 0), Choice())
    message = fields.get("message") or fields.get("delta") or {}
    choice.text += fields.get("text") or message.get("content") or ""
    choice.tokens += fields.get("token_ids") or []
    _take_logprobs(choice, fields.get("logprobs"))
    choice.prompt_logprobs += [each["logprob"] or 0.0 for each in fields.get("prompt_logprobs") or []]
    if fields.get("finish_reason") is not None:
        choice.finish = fields["finish_reason"]
        answer.ends += 1


def _take_response_event(answer: Answer, event: dict[str, Any]) -> None:
    """Collect the text of an event of the Responses API; the last event repeats it, and has all other parts."""
    if event["type"] == "response.output_text.delta":
        answer.choices.setdefault(0, Choice()).text += event["delta"]
    elif event["type"] in _LAST_EVENTS:
        streamed = answer.choices.pop(0, Choice()).text
        _take(answer, event["response"])
        if answer.error is None:
            assert answer.choices[0].text == streamed, "the deltas are not the text"


def _take_response(answer: Answer, response: dict[str, Any]) -> None:
    choice = answer.choices.setdefault(0, Choice())
    for item in response["output"]:
        for part in item["content"]:
            choice.text += part["text"]
            _take_logprobs(choice, {"content": part.get("logprobs", [])})
    choice.finish = (response["incomplete_details"] or {"reason": response["status"]})["reason"]
    usage = response["usage"]
    answer.usage = (usage["input_tokens"], usage["output_tokens"])
    answer.ends += 1


def _take_message_event(answer: Answer, event: dict[str, Any]) -> None:
    """Parse an event of the Messages API, or a whole message, which has the parts of all events."""
    choice = answer.choices.setdefault(0, Choice())
    parts = [event.get("content_block"), event.get("delta"), *event.get("content", ())]
    choice.text += "".join(part.get("text", "") for part in parts if part is not None)
    ending = event if event["type"] == "message" else event.get("delta", {})
    if ending.get("stop_reason") is not None:
        choice.finish = f"{ending['stop_reason']} {ending['stop_sequence']}"
        usage = event["usage"]
        answer.usage = (usage["input_tokens"] + usage["cache_read_input_tokens"], usage["output_tokens"])
        answer.ends += 1


def _take_numbers(answer: Answer, response: dict[str, Any]) -> None:
    """Parse embeddings, scores, or the results of reranking, whose order near ties may change."""
    for each in response.get("data") or response["results"]:
        vector = each.get("embedding", [each.get("score", each.get("relevance_score"))])
        answer.choices[each["index"]] = Choice(finish="computed", numbers=vector)
        answer.ends += 1
    answer.usage = (response["usage"]["prompt_tokens"], 0)


def _take_logprobs(choice: Choice, fields: Any) -> None:
    """Parse log-probabilities: a list from /generate, ``content`` from chat, parallel columns from completions."""
    if not fields:
        return
    if isinstance(fields, list):
        choice.logprobs += [each["logprob"] for each in fields]
        choice.tops += [sorted(value for _, value in each["top"]) for each in fields]
    elif "content" in fields:
        choice.logprobs += [each["logprob"] for each in fields["content"]]
        choice.tops += [sorted(top["logprob"] for top in each["top_logprobs"]) for each in fields["content"]]
    else:
        choice.logprobs += [0.0 if value is None else value for value in fields["token_logprobs"]]
        choice.tops += [sorted((top or {}).values()) for top in fields["top_logprobs"] or []]


def difference(alone: Answer, busy: Answer) -> str | None:
    """Return the first difference between two answers to one request; None when they are the same."""
    if (alone.status, alone.error) != (busy.status, busy.error) or alone.cut or busy.cut:
        return f"ends: {_end(alone)} / {_end(busy)}"
    if (alone.usage, alone.ends, sorted(alone.choices)) != (busy.usage, busy.ends, sorted(busy.choices)):
        return f"counts: {alone.usage}, {alone.ends} ends / {busy.usage}, {busy.ends} ends"
    for index, one in alone.choices.items():
        other = busy.choices[index]
        if (one.text, one.tokens, one.finish) != (other.text, other.tokens, other.finish):
            return (
                f"choice {index}: {one.text!r} {one.tokens} {one.finish} / "
                f"{other.text!r} {other.tokens} {other.finish}"
            )
        if (unlike := unlike_logprobs(one, other)) is not None:
            return f"choice {index}, {unlike}"
    return None


def unlike_logprobs(one: Choice, other: Choice, *, before: int | None = None) -> str | None:
    """Describe numbers of two choices that differ, log-probabilities only before index ``before``; None if none do."""
    pairs = (
        ("logprobs", [one.logprobs[:before]], [other.logprobs[:before]]),
        ("top logprobs", one.tops[:before], other.tops[:before]),
        ("prompt logprobs", [one.prompt_logprobs], [other.prompt_logprobs]),
        ("numbers", [one.numbers], [other.numbers]),
    )
    for name, some, others in pairs:
        if not _close(some, others):
            return f"{name}: {some} / {others}"
    return None


def _end(answer: Answer) -> str:
    return f"{answer.status} {answer.error or ('cut' if answer.cut else 'finished')}"


def _close(some: list[list[float]], others: list[list[float]]) -> bool:
    """Compare all values within an absolute tolerance, and within a relative one for very unlikely tokens."""
    if [len(row) for row in some] != [len(row) for row in others]:
        return False
    return all(
        math.isclose(one, other, rel_tol=1e-4, abs_tol=LOGPROB_TOLERANCE)
        for row, other_row in zip(some, others, strict=True)
        for one, other in zip(row, other_row, strict=True)
    )
