"""A service of a published checkpoint: structured output, stop strings and streams of a model that knows words.

``make test-integration`` takes one test of each kind, ``make checkpoint`` all of them.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import openai
import pytest
from gguf_models import load_gguf_reference
from jsonschema import Draft202012Validator
from service import Service, running_service
from smollm2 import NAME, render_chat, smollm2
from tiny_models import greedy_tokens
from tokenizers import Tokenizer

from skiff_runtime.config.cache_dirs import tokenizer_cache_dirs
from skiff_runtime.conversion.tokenizer_json import find_or_convert_tokenizer

pytestmark = pytest.mark.integration

ONLY_WHOLE: Final = pytest.mark.checkpoint
QUESTION = "What is the capital of France? Answer with one word."
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 40},
        "country": {"enum": ["France", "Germany", "Japan"]},
        "population": {"type": "integer", "minimum": 0, "maximum": 99999999},
        "landmarks": {
            "type": "array",
            "items": {"type": "string", "maxLength": 30},
            "minItems": 2,
            "maxItems": 2,
        },
    },
    "required": ["city", "country", "population", "landmarks"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The current weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 40},
                "unit": {"enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    flags = (
        "--dtype",
        "float32",
        "--max-model-len",
        "1024",
        "--max-total-tokens",
        "8192",
        "--tool-call-parser",
        "hermes",
    )
    with running_service(smollm2(), *flags) as running:
        yield running


@pytest.fixture(scope="module")
def client(service: Service) -> openai.OpenAI:
    return openai.OpenAI(base_url=service.url + "/v1", api_key="none", max_retries=0, timeout=240)


def ask(client: openai.OpenAI, content: str, **options: Any) -> Any:
    """Return the choice of a greedy completion, or the list of its chunks."""
    settings = {"temperature": 0, "max_tokens": 64, **options}
    reply: Any = client.chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": content}], **settings
    )
    return list(reply) if settings.get("stream") else reply.choices[0]


@ONLY_WHOLE
def test_greedy_text_is_that_of_transformers(client: openai.OpenAI) -> None:
    tokenizer = Tokenizer.from_file(
        str(find_or_convert_tokenizer(smollm2(), tokenizer_cache_dirs(None)) / "tokenizer.json")
    )
    reference = load_gguf_reference(smollm2())
    prompt = tokenizer.encode(render_chat(QUESTION), add_special_tokens=False).ids
    expected = tokenizer.decode(greedy_tokens(reference, prompt, 24), skip_special_tokens=False)
    expected = expected.partition("<|im_end|>")[0]
    assert ask(client, QUESTION, max_tokens=24).message.content == expected
    assert "Paris" in expected


def test_stream_has_the_text_of_the_whole_answer(client: openai.OpenAI) -> None:
    question = "List three fruits and say why each is healthy."
    whole = ask(client, question, max_tokens=16)
    chunks = ask(client, question, max_tokens=16, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.message.content
    assert len(chunks) > 10


@pytest.mark.parametrize("stream", [pytest.param(False, marks=ONLY_WHOLE), True])
def test_stop_string_cuts_the_answer_before_it(client: openai.OpenAI, stream: bool) -> None:
    question = "Write three short sentences about the sea."
    whole = ask(client, question, max_tokens=24).message.content
    words = whole.split(" ")
    stop = f"{words[4][-2:]} {words[5][:3]}"  # across the border of two words, and so of two tokens
    reply = ask(client, question, stop=[stop, "never in this text"], stream=stream)
    if stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in reply if chunk.choices)
        reason = next(each.choices[0].finish_reason for each in reversed(reply) if each.choices)
    else:
        text, reason = reply.message.content, reply.finish_reason
    assert text == whole[: whole.index(stop)] and text
    assert reason == "stop"


@pytest.mark.parametrize(("temperature", "seeds"), [(0.0, 1), pytest.param(1.0, 3, marks=ONLY_WHOLE)])
def test_structured_output_fits_its_schema(client: openai.OpenAI, temperature: float, seeds: int) -> None:
    """Answers of several seeds are made in one batch; greedy ones do not depend on the seed."""
    named = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}

    def describe(seed: int) -> Any:
        return ask(
            client,
            "Describe Tokyo as JSON with city, country, population and two landmarks.",
            response_format=named,
            temperature=temperature,
            seed=seed,
            max_tokens=200,
        )

    with ThreadPoolExecutor(seeds) as pool:
        for choice in pool.map(describe, range(seeds)):
            assert choice.finish_reason == "stop"
            Draft202012Validator(SCHEMA).validate(json.loads(choice.message.content))


def test_unconstrained_answer_is_not_json_by_itself(client: openai.OpenAI) -> None:
    """The grammar, not the prompt, makes the answers above valid."""
    text = ask(client, "Describe Tokyo in one sentence.", max_tokens=16).message.content
    with pytest.raises(ValueError, match="Expecting value"):
        json.loads(text)


def test_tools_are_refused_because_the_template_does_not_show_them(client: openai.OpenAI) -> None:
    """Whatever the choice: a call would be made up, since the model never sees the tools."""
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("auto", "required", named):
        with pytest.raises(openai.BadRequestError, match="does not show tools to the model"):
            ask(client, "What is the weather in Paris?", tools=[WEATHER], tool_choice=choice)


def test_log_probabilities_are_those_of_the_chosen_tokens(client: openai.OpenAI) -> None:
    choice = ask(client, QUESTION, max_tokens=12, logprobs=True, top_logprobs=3)
    for each in choice.logprobs.content:
        assert each.token == each.top_logprobs[0].token and each.logprob == each.top_logprobs[0].logprob
        assert each.logprob >= each.top_logprobs[1].logprob >= each.top_logprobs[2].logprob
    text = "".join(each.token for each in choice.logprobs.content)
    assert text.startswith(choice.message.content)
