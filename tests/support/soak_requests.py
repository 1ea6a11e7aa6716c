"""Requests of the soak test to the demo model: deterministic ones for each endpoint, and ones that must be refused."""

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
_STOPS: Final = ("e", " a", "o", "is", ".", "the")
Body = dict[str, Any]


CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
GENERATE: Final = "/generate"
RESPONSES: Final = "/v1/responses"
MESSAGES: Final = "/v1/messages"
EMBEDDINGS: Final = "/v1/embeddings"
RERANK: Final = "/v1/rerank"
SCORE: Final = "/v1/score"
POOLING: Final = (EMBEDDINGS, RERANK, SCORE)


@dataclass(frozen=True, slots=True)
class Question:
    """A request whose answer must be the same streamed or not."""

    path: str
    body: Body

    def make_body(self, *, stream: bool) -> Body:
        """Return the request body. Endpoints of vectors and scores have no streams."""
        if not stream or self.path in POOLING:
            return self.body
        options = {"stream_options": {"include_usage": True}} if self.path in (CHAT, COMPLETIONS) else {}
        return {**self.body, "stream": True, **options}

    def make_long_body(self, tokens: int, *, stream: bool) -> Body:
        """Return the body of a request for an answer that goes on for ``tokens`` tokens, if neither the endpoint nor a grammar ends it."""
        body = self.make_body(stream=stream)
        if self.path in POOLING or {"response_format", "guided_choice", "text", "output_config"} & set(body):
            return body
        limit = "max_output_tokens" if self.path == RESPONSES else "max_tokens"
        return {**body, limit: tokens, **({} if self.path == MESSAGES else {"ignore_eos": True})}


def questions(count: int, seed: int) -> list[Question]:
    """Make ``count`` different questions with a deterministic answer each: greedy or seeded."""
    draw = random.Random(seed)
    return [_question(draw, number) for number in range(count)]


def _question(draw: random.Random, number: int) -> Question:
    """Make one question. Endpoints and kinds alternate; each text is unique, some share a long prefix."""
    text = f"{draw.choice(_TEXTS)} ({number})"
    match number % 6:
        case 3:
            return _responses_question(draw, text, number // 6)
        case 4:
            return _messages_question(draw, text, number // 6)
        case 5:
            return _pooling_question(draw, text, number // 6)
    body: Body = {"max_tokens": draw.randint(1, MAX_ANSWER_TOKENS), **_KINDS[number % len(_KINDS)](draw)}
    if "response_format" in body or number % 6 == 0:
        messages = [*_draw_system(draw), {"role": "user", "content": text}]
        if "logprobs" in body:
            body = {**body, "logprobs": True, "top_logprobs": body["logprobs"]}
        return Question(CHAT, {"model": MODEL, "messages": messages, **body})
    if number % 6 == 1 and "n" not in body:
        return Question(GENERATE, {"text": text, **body})
    prompt = [draw.randrange(10, 2000) for _ in range(draw.randint(1, 60))] if draw.random() < 0.3 else text
    return Question(COMPLETIONS, {"model": MODEL, "prompt": prompt, **body})


def _draw_system(draw: random.Random) -> list[Body]:
    return [{"role": "system", "content": _SYSTEM}] if draw.random() < 0.5 else []


def _responses_question(draw: random.Random, text: str, number: int) -> Question:
    kind = (_greedy, _seeded, _narrowed, _stopped, _penalized, _biased)[number % 6](draw)
    if number % 7 == 0:
        form = {"type": "json_schema", "name": "answer", "schema": _SCHEMA}
        kind = {"temperature": 0, "text": {"format": form}}
    body = {
        "model": MODEL,
        "input": [*_draw_system(draw), {"role": "user", "content": text}],
        "max_output_tokens": 12 if "text" in kind else draw.randint(1, MAX_ANSWER_TOKENS),
        "store": draw.random() < 0.1,
        "top_logprobs": draw.randint(0, 4),
    }
    return Question(RESPONSES, {**body, **kind})


def _messages_question(draw: random.Random, text: str, number: int) -> Question:
    body: Body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": draw.randint(1, MAX_ANSWER_TOKENS),
        "temperature": 0,
    }
    if draw.random() < 0.5:
        body["system"] = _SYSTEM
    match number % 4:
        case 1:
            seed = draw.randrange(1 << 40)
            body |= {
                "temperature": draw.uniform(0.3, 1),
                "seed": seed,
                "top_p": 0.9,
                "top_k": draw.randint(2, 40),
            }
        case 2:
            body["stop_sequences"] = draw.sample(_STOPS, 2)
        case 3:
            body |= {
                "max_tokens": 12,
                "output_config": {"format": {"type": "json_schema", "schema": _SCHEMA}},
            }
    return Question(MESSAGES, body)


def _pooling_question(draw: random.Random, text: str, number: int) -> Question:
    texts = [text, *draw.sample(_TEXTS, draw.randint(1, 3))]
    match number % 4:
        case 0:
            return Question(RERANK, {"model": MODEL, "query": text, "documents": texts})
        case 1:
            return Question(SCORE, {"model": MODEL, "text_1": text, "text_2": texts})
        case 2:
            return Question(EMBEDDINGS, {"model": MODEL, "input": texts, "dimensions": draw.randint(1, 64)})
    ids = [draw.randrange(10, 2000) for _ in range(draw.randint(1, 60))]
    return Question(EMBEDDINGS, {"model": MODEL, "input": ids})


def _greedy(draw: random.Random) -> Body:
    return {"temperature": 0}


def _seeded(draw: random.Random) -> Body:
    return {"temperature": draw.uniform(0.3, 1.5), "seed": draw.randrange(1 << 40)}


def _narrowed(draw: random.Random) -> Body:
    return {**_seeded(draw), "top_p": 0.9, "top_k": draw.randint(2, 40), "min_p": 0.02}


def _stopped(draw: random.Random) -> Body:
    return {"temperature": 0, "stop": draw.sample(_STOPS, 2)}


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
    messages = [{"role": "user", "content": "x"}]
    long = "boat " * (CONTEXT + 100)
    match draw.randrange(6):
        case 0:
            ids = [draw.randrange(10, 2000)] * (CONTEXT + draw.randint(1, 500))
            return Question(COMPLETIONS, {"model": MODEL, "prompt": ids})
        case 1:
            return Question(GENERATE, {"text": long, "max_tokens": 1})
        case 2:
            return Question(RESPONSES, {"model": MODEL, "input": "x", "max_output_tokens": CONTEXT})
        case 3:
            turns = [{"role": "user", "content": long}]
            return Question(MESSAGES, {"model": MODEL, "messages": turns, "max_tokens": 1})
        case 4:
            return Question(EMBEDDINGS, {"model": MODEL, "input": ["x", long]})
    return Question(CHAT, {"model": MODEL, "messages": messages, "max_tokens": CONTEXT})


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
    ("/v1/responses", b'{"model": "demo", "input": 7}'),
    ("/v1/responses", b'{"model": "demo", "input": [{"type": "item_reference", "id": "no"}], "n": 2}'),
    ("/v1/messages", b'{"model": "demo", "messages": []}'),
    ("/v1/messages", b'{"model": "demo", "messages": [{"role": "user", "content": "x"}]}'),
    ("/v1/messages/count_tokens", b'{"model": "demo", "messages": "x"}'),
    ("/v1/embeddings", b'{"model": "demo", "input": []}'),
    ("/v1/embeddings", b'{"model": "demo", "input": "x", "dimensions": 100000}'),
    ("/v1/rerank", b'{"model": "demo", "query": "x"}'),
    ("/v1/score", b'{"model": "demo", "text_1": ["x", "y"], "text_2": ["z"]}'),
)
