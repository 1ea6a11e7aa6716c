"""Effects of sampling parameters on the tokens: OpenAI's client, a whole service, transformers as the reference."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from openai import OpenAI
from service import Service, running_service, wait_until
from tiny_models import load_reference, make_model, oracle_logits
from tiny_tokenizer import EOS_ID
from tokenizers import Tokenizer

pytestmark = pytest.mark.integration

NAME: Final = "tiny"
PROMPT: Final = "The small boat crosses the harbour"
CONTEXT: Final = 128
COUNT: Final = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reference(model: Path) -> Any:
    return load_reference(model)


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model / "tokenizer.json"))


@pytest.fixture(scope="module")
def service(model: Path) -> Iterator[Service]:
    flags = ("--served-model-name", NAME, "--max-model-len", str(CONTEXT), "--max-total-tokens", "4096")
    with running_service(model, *flags) as service:
        yield service


@pytest.fixture
def client(service: Service) -> Iterator[OpenAI]:
    with OpenAI(base_url=service.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def generate(service: Service, prompt: list[int], **options: Any) -> dict[str, Any]:
    body = {"temperature": 0, "max_tokens": COUNT, "ignore_eos": True, **options, "token_ids": prompt}
    response = service.http.post(service.url + "/generate", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def logits_after(reference: Any, tokens: list[int]) -> torch.Tensor:
    [logits] = oracle_logits(reference, [tokens], [[0]])
    return logits[0].clone()


def greedy(reference: Any, prompt: list[int], change: Callable[[torch.Tensor, list[int]], None]) -> list[int]:
    """Return the greedy tokens of logits that ``change`` has modified, given the output so far."""
    output: list[int] = []
    for _ in range(COUNT):
        logits = logits_after(reference, prompt + output)
        change(logits, output)
        output.append(int(logits.argmax()))
    return output


def test_choices_of_a_seeded_request_use_consecutive_seeds(client: OpenAI) -> None:
    together = client.completions.create(model=NAME, prompt=PROMPT, n=3, seed=40, temperature=1.0)
    alone = [
        client.completions.create(model=NAME, prompt=PROMPT, seed=40 + n, temperature=1.0).choices[0].text
        for n in range(3)
    ]
    assert [choice.text for choice in together.choices] == alone
    assert len(set(alone)) == 3


def test_penalties_match_the_reference(service: Service, reference: Any, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(PROMPT).ids

    def presence(logits: torch.Tensor, output: list[int]) -> None:
        logits[sorted(set(output))] -= 2.0

    def frequency(logits: torch.Tensor, output: list[int]) -> None:
        for token, count in Counter(output).items():
            logits[token] -= 1.5 * count

    def repetition(logits: torch.Tensor, output: list[int]) -> None:
        seen = sorted({*prompt, *output})
        logits[seen] = torch.where(logits[seen] > 0, logits[seen] / 1.8, logits[seen] * 1.8)

    def none(logits: torch.Tensor, output: list[int]) -> None:
        pass

    plain = generate(service, prompt)["token_ids"]
    assert plain == greedy(reference, prompt, none)
    for change, options in (
        (presence, {"presence_penalty": 2.0}),
        (frequency, {"frequency_penalty": 1.5}),
        (repetition, {"repetition_penalty": 1.8}),
    ):
        tokens = generate(service, prompt, **options)["token_ids"]
        assert tokens == greedy(reference, prompt, change)


def test_logit_bias_forces_and_forbids_tokens(client: OpenAI, service: Service, tokenizer: Tokenizer) -> None:
    boat = tokenizer.encode(" boat", add_special_tokens=False).ids[0]
    answer = client.completions.create(
        model=NAME, prompt=PROMPT, logit_bias={str(boat): 100}, max_tokens=4, temperature=1
    )
    assert answer.choices[0].text == tokenizer.decode([boat] * 4)
    prompt = tokenizer.encode(PROMPT).ids
    first = generate(service, prompt)["token_ids"][0]
    assert first not in generate(service, prompt, logit_bias={str(first): -100})["token_ids"]


def test_min_tokens_and_max_tokens_bound_the_output(client: OpenAI) -> None:
    """A bias forces the end of sequence, which comes after ``min_tokens``, unless it is ignored."""
    ends: Any = {"model": NAME, "prompt": PROMPT, "logit_bias": {str(EOS_ID): 100}, "temperature": 0}
    for min_tokens in (0, 5):
        answer = client.completions.create(**ends, extra_body={"min_tokens": min_tokens})
        assert answer.usage is not None
        assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("stop", min_tokens + 1)
    answer = client.completions.create(**ends, max_tokens=7, extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 7)


def test_top_k_1_min_p_1_and_tiny_top_p_are_greedy(service: Service, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(PROMPT).ids
    plain = generate(service, prompt)["token_ids"]
    for narrow in ({"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}):
        assert generate(service, prompt, temperature=2.0, **narrow)["token_ids"] == plain
    assert generate(service, prompt, temperature=2.0, seed=1)["token_ids"] != plain


def test_stop_tokens_and_stop_strings_end_the_output(service: Service, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(PROMPT).ids
    tokens = generate(service, prompt)["token_ids"]
    index = next(n for n in range(3, COUNT) if tokens[n] not in tokens[:n])
    for shown in (False, True):
        answer = generate(service, prompt, stop_token_ids=[tokens[index]], include_stop_str_in_output=shown)
        assert (answer["finish_reason"], answer["usage"]["completion_tokens"]) == ("stop", index + 1)
        assert answer["text"] == tokenizer.decode(tokens[: index + shown])
    whole = tokenizer.decode(tokens)
    stop = whole[5:9]
    begin = whole.index(stop)
    for shown in (False, True):
        answer = generate(service, prompt, stop=[stop], include_stop_str_in_output=shown)
        assert (answer["finish_reason"], answer["text"]) == ("stop", whole[: begin + len(stop) * shown])


def test_logprobs_are_the_models_own(client: OpenAI, reference: Any, tokenizer: Tokenizer) -> None:
    """They do not depend on the temperature."""
    answer = client.completions.create(
        model=NAME, prompt=PROMPT, logprobs=5, seed=3, temperature=1.7, max_tokens=COUNT,
        extra_body={"ignore_eos": True, "skip_special_tokens": False},
    )  # fmt: skip
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None and logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None and len(logprobs.tokens) == COUNT
    ids = native_ids(logprobs.tokens, tokenizer)
    [logits] = oracle_logits(reference, [tokenizer.encode(PROMPT).ids], [ids])
    expected = logits.log_softmax(-1)
    for row, token, value, top in zip(
        expected, ids, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert value == pytest.approx(float(row[token]), abs=2e-3)
        assert sorted(top.values())[-5:] == pytest.approx(sorted(row.topk(5).values.tolist()), abs=2e-3)


def test_loglikelihoods_as_lm_eval_asks_them(service: Service, reference: Any, tokenizer: Tokenizer) -> None:
    """It sends contexts and continuations as token ids, and drops the token that is generated behind them."""
    context = tokenizer.encode(PROMPT).ids
    likely = greedy(reference, context, lambda logits, output: None)[:5]
    pairs = [
        (context, [40, 41, 42]),
        (context, likely),
        (context[:1], [300]),
        (context, [260, likely[0], 7, 8]),
    ]
    body = {
        "model": NAME,
        "prompt": [context + continuation for context, continuation in pairs],
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    answer = service.http.post(service.url + "/v1/completions", json=body).json()
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    for (context, continuation), choice in zip(pairs, choices, strict=True):
        logprobs = choice["logprobs"]
        assert len({len(column) for column in logprobs.values()}) == 1
        own = logprobs["token_logprobs"][len(context) : -1]
        tops = logprobs["top_logprobs"][len(context) : -1]
        [logits] = oracle_logits(reference, [context], [continuation])
        expected = logits.log_softmax(-1)[range(len(continuation)), continuation]
        assert sum(own) == pytest.approx(float(expected.sum()), abs=2e-3)
        is_greedy = all(value == max(top.values()) for value, top in zip(own, tops, strict=True))
        assert is_greedy == (logits.argmax(-1).tolist() == continuation)
        offset = logprobs["text_offset"][len(context)]
        assert choice["text"][offset:].startswith(tokenizer.decode(continuation[:1]).replace("\ufffd", ""))
    assert [choice["finish_reason"] for choice in choices] == ["length"] * len(pairs)


def test_prompt_logprobs_have_ranks(service: Service, reference: Any, tokenizer: Tokenizer) -> None:
    """They are those of vLLM's field: by token id, the most likely tokens and the prompt's own."""
    fields = {"model": NAME, "max_tokens": 2, "prompt_logprobs": 2}
    prompt = {"prompt": PROMPT, "echo": True, "logprobs": 4}
    answer = service.http.post(service.url + "/v1/completions", json={**fields, **prompt}).json()
    [choice] = answer["choices"]
    assert_prompt_logprobs(choice["prompt_logprobs"], tokenizer.encode(PROMPT).ids, reference)
    assert {len(top) for top in choice["logprobs"]["top_logprobs"][1:-2]} <= {4, 5}
    messages = [{"role": "user", "content": PROMPT}]
    ids = service.http.post(service.url + "/tokenize", json={"messages": messages}).json()["tokens"]
    chat = {**fields, "messages": messages, "n": 2}
    answer = service.http.post(service.url + "/v1/chat/completions", json=chat).json()
    assert_prompt_logprobs(answer["prompt_logprobs"], ids, reference)
    chat["stream"] = True
    refused = service.http.post(service.url + "/v1/chat/completions", json=chat)
    assert refused.status_code == 400 and "remove 'stream'" in refused.json()["error"]["message"]


def assert_prompt_logprobs(found: list[Any], ids: list[int], reference: Any) -> None:
    [logits] = oracle_logits(reference, [ids[:1]], [ids[1:]])
    assert found[0] is None and len(found) == len(ids)
    for row, token, position in zip(logits.log_softmax(-1), ids[1:], found[1:], strict=True):
        rank = int((row >= row[token]).sum())
        assert position[str(token)]["rank"] == rank
        assert position[str(token)]["logprob"] == pytest.approx(float(row[token]), abs=2e-3)
        assert sorted(each["rank"] for each in position.values()) == sorted({1, 2, rank})


def native_ids(tokens: list[str], tokenizer: Tokenizer) -> list[int]:
    """Return the ids of tokens in the form that completions use."""
    by_text = {
        tokenizer.decode([token], skip_special_tokens=False): token
        for token in range(tokenizer.get_vocab_size())
    }
    found = []
    for text in tokens:
        if text.startswith("bytes:"):
            text = "".join(_BYTE_LETTERS[int(code, 16)] for code in text[6:].split("\\x")[1:])
            token = tokenizer.token_to_id(text)
            assert token is not None, text
        else:
            token = by_text[text]
        found.append(token)
    return found


def _byte_letters() -> list[str]:
    """Return the letter that stands for each byte in a byte-level BPE vocabulary."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


_BYTE_LETTERS: Final = _byte_letters()


def test_logprobs_of_an_echoed_prompt_match_the_reference(
    client: OpenAI, reference: Any, tokenizer: Tokenizer
) -> None:
    """As evaluation harnesses request them: token ids, nothing generated; twice, so that the prefix is cached."""
    ids = tokenizer.encode(PROMPT).ids
    [logits] = oracle_logits(reference, [ids[:1]], [ids[1:]])
    expected = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    for _ in range(2):
        answer = client.completions.create(model=NAME, prompt=ids, echo=True, logprobs=1, max_tokens=0)
        [choice] = answer.choices
        assert choice.text == "<|begin|>" + PROMPT and choice.logprobs is not None
        values = choice.logprobs.token_logprobs
        assert values is not None and values[0] is None
        assert values[1:] == pytest.approx(expected, abs=2e-3)
        assert answer.usage is not None and answer.usage.total_tokens == len(ids)


def test_chat_without_max_tokens_fills_the_context(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": "hi"}], extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    assert (answer.usage.total_tokens, answer.choices[0].finish_reason) == (CONTEXT, "length")


def test_usage_reports_cached_tokens_and_the_log_names_the_user(client: OpenAI, service: Service) -> None:
    """A prompt is cached once it was served; the log contains the request's user."""
    for expected in (0, 32):
        answer = client.completions.create(model=NAME, prompt=[[7, 8, 9] * 12], max_tokens=1, user="walrus")
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == expected
    wait_until(lambda: service.log_text().count("user=walrus") == 2)
