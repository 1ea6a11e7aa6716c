"""Requests of the soak test to the demo model: deterministic questions, and requests that must be refused."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

MODEL: Final = "demo"
CONTEXT: Final = 2048
MAX_ANSWER_TOKENS: Final = 8
_TEXTS: Final = (
    "What is a pod?",
    "How do I scale a deployment?",
    "Tell me about services in Kubernetes.",
    "Grüße aus Köln, 東京の朝, and a few emoji: 🙂🚀.",
    "Name three colours.",
    "def add(a, b):\n    return",
    "The small boat crosses the harbour before the morning wind begins to blow.",
    "x",
)
_SYSTEM: Final = "You are a helpful assistant that answers in short plain sentences and never guesses."
_SCHEMA: Final = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Question:
    """A request whose answer must be the same streamed or not."""

    path: str
    body: Body

    def make_body(self, *, stream: bool) -> Body:
        """Return the request body."""
        if not stream:
            return self.body
        options = {} if self.path == "/generate" else {"stream_options": {"include_usage": True}}
        return {**self.body, "stream": True, **options}


def questions(count: int, seed: int) -> list[Question]:
    """Make ``count`` different questions with a deterministic answer each: greedy or seeded."""
    draw = random.Random(seed)
    return [_question(draw, number) for number in range(count)]


def _question(draw: random.Random, number: int) -> Question:
    """Make one question. Endpoints and kinds alternate; each text is unique, some share a long prefix."""
    text = f"{draw.choice(_TEXTS)} ({number})"
    body: Body = {"max_tokens": draw.randint(1, MAX_ANSWER_TOKENS), **_KINDS[number % len(_KINDS)](draw)}
    if "response_format" in body or number % 3 == 0:
        turns = [{"role": "system", "content": _SYSTEM}] if draw.random() < 0.5 else []
        messages = [*turns, {"role": "user", "content": text}]
        if "logprobs" in body:
            body = {**body, "logprobs": True, "top_logprobs": body["logprobs"]}
        return Question("/v1/chat/completions", {"model": MODEL, "messages": messages, **body})
    if number % 3 == 1 and "n" not in body:
        return Question("/generate", {"text": text, **body})
    prompt = [draw.randrange(10, 2000) for _ in range(draw.randint(1, 60))] if draw.random() < 0.3 else text
    return Question("/v1/completions", {"model": MODEL, "prompt": prompt, **body})


def _greedy(draw: random.Random) -> Body:
    return {"temperature": 0}


def _seeded(draw: random.Random) -> Body:
    return {"temperature": draw.uniform(0.3, 1.5), "seed": draw.randrange(1 << 40)}


def _narrowed(draw: random.Random) -> Body:
    return {**_seeded(draw), "top_p": 0.9, "top_k": draw.randint(2, 40), "min_p": 0.02}


def _stopped(draw: random.Random) -> Body:
    return {"temperature": 0, "stop": draw.sample(["e", " a", "o", "is", ".", "the"], 2)}


def _with_logprobs(draw: random.Random) -> Body:
    return {"temperature": 0, "logprobs": draw.randint(1, 4)}


def _twice(draw: random.Random) -> Body:
    return {**_seeded(draw), "n": 2}


def _penalized(draw: random.Random) -> Body:
    penalties = {"presence_penalty": draw.uniform(-2, 2), "frequency_penalty": draw.uniform(-2, 2)}
    return {"temperature": 0, **penalties, "repetition_penalty": draw.uniform(0.8, 1.5)}


def _biased(draw: random.Random) -> Body:
    biases = {str(draw.randrange(10, 2000)): draw.uniform(-20, 20) for _ in range(5)}
    return {**_seeded(draw), "logit_bias": biases, "min_tokens": 1, "ignore_eos": True}


def _structured(draw: random.Random) -> Body:
    named = {"name": "answer", "schema": _SCHEMA}
    return {
        "temperature": 0,
        "max_tokens": 12,
        "response_format": {"type": "json_schema", "json_schema": named},
    }


def _chosen(draw: random.Random) -> Body:
    return {"temperature": 0, "guided_choice": ["yes", "no", "perhaps"]}


_KINDS: Final[tuple[Callable[[random.Random], Body], ...]] = (
    _greedy,
    _seeded,
    _narrowed,
    _stopped,
    _with_logprobs,
    _twice,
    _penalized,
    _biased,
    _seeded,
    _greedy,
    _with_logprobs,
    _structured,
    _stopped,
    _chosen,
)


def too_long(draw: random.Random) -> Question:
    """Draw a request whose prompt, or prompt and output, exceed the context."""
    match draw.randrange(3):
        case 0:
            ids = [draw.randrange(10, 2000)] * (CONTEXT + draw.randint(1, 500))
            return Question("/v1/completions", {"model": MODEL, "prompt": ids})
        case 1:
            return Question("/generate", {"text": "boat " * (CONTEXT + 100), "max_tokens": 1})
    messages = [{"role": "user", "content": "x"}]
    return Question("/v1/chat/completions", {"model": MODEL, "messages": messages, "max_tokens": CONTEXT})


def malformed(draw: random.Random) -> tuple[str, bytes]:
    """Draw the path and the raw body of an invalid request."""
    return draw.choice(_MALFORMED)


_MALFORMED: Final = (
    ("/v1/completions", b""),
    ("/v1/completions", b"{"),
    ("/v1/completions", b"[1, 2]"),
    ("/v1/completions", b'{"model": "demo", "prompt": {"a": 1}}'),
    ("/v1/completions", b'{"model": "demo", "prompt": "x", "max_tokens": -1}'),
    ("/v1/completions", b'{"model": "demo", "prompt": "x", "temperature": "hot"}'),
    ("/v1/completions", b'{"model": "demo", "prompt": "x", "unheard_of": 1}'),
    ("/v1/completions", b'{"model": "demo", "prompt": [99999999]}'),
    ("/v1/completions", b'{"model": "demo", "prompt": "\\ud800"}'),
    ("/v1/chat/completions", b'{"model": "demo", "messages": []}'),
    ("/v1/chat/completions", b'{"model": "demo", "messages": [{"role": "wizard", "content": "x"}]}'),
    ("/v1/chat/completions", b'{"model": "demo", "messages": [{"role": "user", "content": "x"}], "n": 0}'),
    (
        "/v1/chat/completions",
        b'{"model": "demo", "messages": [{"role": "user", "content": "x"}], "top_logprobs": 3}',
    ),
    ("/generate", b'{"text": "x", "token_ids": [1]}'),
    ("/generate", b'{"text": "x", "stop": [""]}'),
    ("/generate", b'\xff\xfe{"text": "x"}'),
    ("/generate", b'{"text": "x", "guided_regex": "("}'),
    ("/tokenize", b'{"prompt": 7}'),
)
