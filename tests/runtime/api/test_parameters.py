"""Parameters of the generation endpoints reach the scheduler, and show in the response where they should."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from frontend import NAME, TIMEOUT_SECONDS, Echo, Frontend, running_frontend, write_model
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

from skiff_runtime.messages import FinishReason, GenerateRequest, SamplingSpec

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
NATIVE = "/generate"
INPUTS: dict[str, dict[str, Any]] = {
    CHAT: {"model": NAME, "messages": [{"role": "user", "content": "hi"}]},
    TEXT: {"model": NAME, "prompt": "hi"},
    NATIVE: {"text": "hi"},
}
TEMPLATE = (
    "{{ bos_token }}{% if enable_thinking is defined %}thinking={{ enable_thinking }} {% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if verbosity %}verbosity={{ verbosity }} {% endif %}"
    "{% if reasoning_effort %}effort={{ reasoning_effort }} {% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose chat template has an option."""
    directory = write_model(tmp_path_factory.mktemp("model"))
    settings = directory / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": TEMPLATE}))
    return directory


@pytest.fixture(scope="module")
def front(model: Path) -> Iterator[Frontend]:
    with running_frontend(model, allow_priority=True) as front:
        yield front


@pytest.fixture
def client(front: Frontend) -> Iterator[OpenAI]:
    with OpenAI(base_url=front.url + "/v1", api_key="none", timeout=TIMEOUT_SECONDS, max_retries=0) as client:
        yield client


def send(front: Frontend, path: str, **options: Any) -> GenerateRequest:
    """Send a request, end it, and return it as the scheduler received it."""
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(front.post, path, **{**INPUTS[path], **options})
        request = front.rank.request()
        front.rank.finish(request.uid, FinishReason.LENGTH)
        assert asked.result().status_code == 200
    return request


@pytest.mark.parametrize("path", INPUTS)
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"temperature": 0.5}, {"temperature": 0.5}),
        ({"top_p": 0.5}, {"top_p": 0.5}),
        ({"top_k": 7}, {"top_k": 7}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"min_p": 0.25}, {"min_p": 0.25}),
        ({"seed": -5}, {"seed": -5}),
        ({"max_tokens": 9}, {"max_tokens": 9}),
        ({"min_tokens": 3, "max_tokens": 9}, {"min_tokens": 3}),
        ({"ignore_eos": True}, {"ignore_eos": True}),
        ({"stop_token_ids": [5, 9]}, {"stop_token_ids": (5, 9)}),
        ({"presence_penalty": -1.5}, {"presence_penalty": -1.5}),
        ({"frequency_penalty": 2}, {"frequency_penalty": 2.0}),
        ({"repetition_penalty": 1.25}, {"repetition_penalty": 1.25}),
        ({"logit_bias": {"388": -100, "5": 1.5}}, {"logit_bias": ((5, 1.5), (388, -100.0))}),
        ({"allowed_token_ids": [9, 5]}, {"allowed_token_ids": (9, 5)}),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else None,
)
def test_sampling_parameters_reach_the_scheduler(
    front: Frontend, path: str, options: dict[str, Any], expected: dict[str, Any]
) -> None:
    sampling = send(front, path, **options).sampling
    assert {name: getattr(sampling, name) for name in expected} == expected


@pytest.mark.parametrize(("path", "max_tokens"), [(CHAT, 0), (TEXT, 16), (NATIVE, 0)])
def test_defaults_of_a_request_without_parameters(front: Frontend, path: str, max_tokens: int) -> None:
    """Without a limit, a chat completion may fill the context (0); a completion has 16 tokens."""
    request = send(front, path)
    assert request.sampling == SamplingSpec(max_tokens=max_tokens, seed=request.sampling.seed)
    assert (request.priority, request.text.stop, request.text.include_stop_str_in_output) == (0, (), False)


@pytest.mark.parametrize("path", INPUTS)
def test_text_options_and_priority_reach_the_scheduler(front: Frontend, path: str) -> None:
    request = send(
        front,
        path,
        stop=["END", "\n"],
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        priority=-3,
        user="someone",
    )
    text = request.text
    assert (text.stop, text.include_stop_str_in_output, text.skip_special_tokens) == (
        ("END", "\n"),
        True,
        False,
    )
    assert request.priority == -3


@pytest.mark.parametrize(
    ("path", "options", "logprobs", "prompt_logprobs"),
    [
        (CHAT, {"logprobs": True}, 0, None),
        (CHAT, {"logprobs": True, "top_logprobs": 20}, 20, None),
        (CHAT, {"logprobs": False}, None, None),
        (TEXT, {"logprobs": 0}, 0, None),
        (TEXT, {"logprobs": 5}, 5, None),
        (TEXT, {"logprobs": 5, "echo": True}, 5, 5),
        (NATIVE, {"logprobs": 2}, 2, None),
        (NATIVE, {"prompt_logprobs": 1}, None, 1),
    ],
)
def test_number_of_logprobs_reaches_the_scheduler(
    front: Frontend, path: str, options: dict[str, Any], logprobs: int | None, prompt_logprobs: int | None
) -> None:
    sampling = send(front, path, **options).sampling
    assert (sampling.logprobs, sampling.prompt_logprobs) == (logprobs, prompt_logprobs)


@pytest.mark.parametrize("bias", [{"389": 1}, {"x": 1}, {"-1": 1}, {"05": 1}, {"٣": 1}, {"9" * 5000: 1}])
def test_logit_bias_of_an_unknown_token_is_refused(front: Frontend, bias: dict[str, int]) -> None:
    error = front.post(TEXT, **INPUTS[TEXT], logit_bias=bias).json()["error"]
    assert error["param"] == "logit_bias" and "from 0 to 388" in error["message"]
    assert len(error["message"]) < 300


def render(front: Frontend, **options: Any) -> str:
    ids = front.rank.prompt_ids(send(front, CHAT, **options))
    return front.rank.tokenizer.decode(ids, skip_special_tokens=False)


def test_output_continues_the_final_message(front: Frontend) -> None:
    messages = [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": "The small"}]
    plain = render(front, messages=messages)
    assert plain.endswith("The small<|end|><|assistant|>")
    assert render(front, messages=messages, continue_final_message=True) == plain.removesuffix(
        "<|end|><|assistant|>"
    )
    no_prompt = render(front, messages=messages, add_generation_prompt=False)
    assert no_prompt == plain.removesuffix("<|assistant|>")


def test_chat_template_kwargs_reach_the_template(front: Frontend) -> None:
    assert "thinking" not in render(front)
    assert "thinking=False " in render(front, chat_template_kwargs={"enable_thinking": False})


def test_effort_and_verbosity_reach_a_template_that_reads_them(front: Frontend) -> None:
    shown = render(front, reasoning_effort="none", verbosity="low")
    assert "thinking=False " in shown and "verbosity=low " in shown and "effort=none " in shown
    assert "thinking=True " in render(front, reasoning_effort="high")


@pytest.mark.parametrize("path", INPUTS)
def test_prompt_options_reach_the_tokenizer(front: Frontend, path: str) -> None:
    plain = front.rank.prompt_ids(send(front, path))
    assert front.rank.prompt_ids(send(front, path, truncate_prompt_tokens=2)) == plain[-2:]
    words = send(front, path, bad_words=["boat"]).sampling.bad_words
    assert words == (tuple(front.rank.encode("boat")), tuple(front.rank.encode(" boat")))
    special = front.rank.prompt_ids(send(front, path, add_special_tokens=path == CHAT))
    assert special == ([plain[0], *plain] if path == CHAT else plain[1:])


def test_spelling_of_sglang_means_the_same(front: Frontend) -> None:
    ours = send(
        *(front, NATIVE), text=None, token_ids=[5, 6], max_tokens=9, min_tokens=2, seed=4, temperature=0.5, stop="x",
        logprobs=2, include_stop_str_in_output=True, return_token_ids=False,
    )  # fmt: skip
    sampling = {
        "max_new_tokens": 9, "min_new_tokens": 2, "sampling_seed": 4, "temperature": 0.5, "stop": "x", "no_stop_trim": True, "n": 1,
    }  # fmt: skip
    theirs = send(
        *(front, NATIVE), text=None, input_ids=[5, 6], sampling_params=sampling, return_logprob=True, top_logprobs_num=2, rid="a",
    )  # fmt: skip
    assert (theirs.sampling, theirs.text, theirs.token_ids) == (ours.sampling, ours.text, ours.token_ids)
    for constraint in ({"regex": "a"}, {"ebnf": 'root ::= "a"'}, {"json_schema": "{}"}):
        assert send(front, NATIVE, sampling_params=constraint).grammar is not None
    for fields, says in (
        ({"temperature": 1, "sampling_params": {"temperature": 1}}, "'temperature' is sent twice"),
        ({"sampling_params": {"min_new_tokens": 3, "max_new_tokens": 2}}, "limited to 2 tokens"),
        ({"sampling_params": {"custom_params": {"a": 1}}}, "custom_params' is not supported"),
        ({"top_logprobs_num": 2}, 'needs "return_logprob"'),
    ):
        reply = front.post(NATIVE, **INPUTS[NATIVE], **fields)
        assert reply.status_code == 400 and says in reply.json()["error"]["message"]


def test_content_parts_are_joined(front: Frontend) -> None:
    parts = [{"type": "text", "text": "The small"}, {"type": "text", "text": " boat"}]
    whole = render(front, messages=[{"role": "user", "content": "The small boat"}])
    assert render(front, messages=[{"role": "user", "content": parts}]) == whole


@pytest.fixture
def echo(front: Frontend) -> Iterator[None]:
    """Answer every request with its prompt."""
    thread = Echo(front.rank)
    thread.start()
    yield
    thread.stop()


def test_fingerprint_depends_on_the_configuration(
    front: Frontend, client: OpenAI, model: Path, echo: None
) -> None:
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]
    whole = client.chat.completions.create(model=NAME, messages=messages)
    stream = list(client.chat.completions.create(model=NAME, messages=messages, stream=True))
    text = client.completions.create(model=NAME, prompt="hi")
    fingerprints = {
        whole.system_fingerprint,
        text.system_fingerprint,
        *(each.system_fingerprint for each in stream),
    }
    assert len(fingerprints) == 1
    [fingerprint] = fingerprints
    assert fingerprint is not None and fingerprint.startswith("fp_")
    with running_frontend(model, page_size=32) as other:
        second = Echo(other.rank)
        second.start()
        assert other.post(TEXT, **INPUTS[TEXT]).json()["system_fingerprint"] != fingerprint
        second.stop()


@pytest.mark.parametrize("path", INPUTS)
@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_are_returned(front: Frontend, echo: None, path: str, stream: bool) -> None:
    """The echoed answer has the prompt's tokens."""
    reply = front.post(path, **INPUTS[path], return_token_ids=True, stream=stream)
    bodies = [reply.json()] if not stream else [
        json.loads(event[6:]) for event in reply.text.strip().split("\n\n") if event != "data: [DONE]"
    ]  # fmt: skip
    choices = [body["choices"][0] if path != NATIVE else body for body in bodies]
    prompts = [
        part["prompt_token_ids"]
        for part in (choices if path == TEXT else bodies)
        if "prompt_token_ids" in part
    ]
    assert len(prompts) == 1 and len(prompts[0]) >= 2
    output = [token for choice in choices for token in choice.get("token_ids", [])]
    assert output == prompts[0]


@pytest.mark.parametrize("copies", [1, 2])
def test_continuous_usage_counts_up_to_the_final_usage(client: OpenAI, echo: None, copies: int) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = list(
        client.completions.create(
            model=NAME, prompt="The small boat", n=copies, stream=True, stream_options=options
        )
    )
    assert last.usage is not None and last.choices == []
    counts = []
    for chunk in chunks:
        assert chunk.usage is not None and chunk.usage.prompt_tokens == last.usage.prompt_tokens
        counts.append(chunk.usage.completion_tokens)
    assert counts == sorted(counts) and 1 <= counts[0] < counts[-1] == last.usage.completion_tokens
    assert last.usage.completion_tokens == copies * last.usage.prompt_tokens
