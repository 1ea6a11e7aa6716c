"""What ``LLM`` gives beside text: streams, log-probabilities, several completions, structure, token ids."""

import gc
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from tiny_models import load_reference, make_model

from skiff_runtime import LLM
from skiff_runtime.errors import InvalidRequest, RequestError
from skiff_runtime.offline.outputs import CompletionDelta
from skiff_runtime.offline.sampling_params import Sampling

PROMPT = [1, 5, 9, 20]
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tokens"), "llama")


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), max_total_tokens=2048, page_size=4, cpu_threads=1) as made:
        yield made


@pytest.fixture(scope="module")
def demo() -> Iterator[LLM]:
    with LLM("demo://", max_total_tokens=4096, cpu_threads=1) as made:
        yield made


def test_a_stream_adds_up_to_the_completion(llm: LLM) -> None:
    [whole] = llm.generate([PROMPT], max_tokens=20, **GREEDY)
    parts = list(llm.stream(PROMPT, max_tokens=20, **GREEDY))
    assert len(parts) == 20
    assert "".join(part.text for part in parts) == whole.text
    assert [token for part in parts for token in part.token_ids] == whole.token_ids
    assert [part.finish_reason for part in parts] == [None] * 19 + ["length"]
    assert parts[-1].prompt_tokens == 4


def test_completions_keep_none_of_their_increments(llm: LLM) -> None:
    """So many small objects would hold up the end of a long call, and make the garbage collector run in it."""
    kept: list[int] = []

    def count(_: int) -> None:
        kept.append(sum(type(each) is CompletionDelta for each in gc.get_objects()))

    llm.generate([PROMPT, [7, 7]], max_tokens=20, on_progress=count, **GREEDY)
    assert len(kept) >= 20 and max(kept) <= kept[0] + 4  # two steps of two rows


def test_two_streams_are_read_in_turn_and_others_run_between(llm: LLM) -> None:
    [one, two] = llm.generate([PROMPT, [7, 7]], max_tokens=9, **GREEDY)
    first, second = (llm.stream(each, max_tokens=9, **GREEDY) for each in (PROMPT, [7, 7]))
    read = [(next(first).token_ids, next(second).token_ids) for _ in range(4)]
    assert llm.generate([[3, 4]], max_tokens=2, **GREEDY)[0].finish_reason == "length"
    read += [(a.token_ids, b.token_ids) for a, b in zip(first, second, strict=True)]
    assert [token for pair, _ in read for token in pair] == one.token_ids
    assert [token for _, pair in read for token in pair] == two.token_ids


def test_a_stream_that_is_left_ends_its_request(llm: LLM) -> None:
    left = llm.stream(PROMPT, max_tokens=400, **GREEDY)
    next(left)
    left.close()
    [after] = llm.generate([PROMPT], max_tokens=2, **GREEDY)  # sees the end of the one before, too
    assert len(after.token_ids) == 2
    assert len(llm._in_flight._owners) == 0


def test_a_conversation_is_streamed(demo: LLM) -> None:
    messages = [{"role": "user", "content": "What is a pod?"}]
    answer = demo.chat(messages, max_tokens=12, temperature=0)
    assert "".join(each.text for each in demo.stream(messages, max_tokens=12, temperature=0)) == answer.text


def test_a_prompt_that_cannot_be_streamed_is_refused_at_once(llm: LLM) -> None:
    with pytest.raises(RequestError, match="empty"):
        llm.stream([])
    with pytest.raises(InvalidRequest, match="no option 'hurry'"):
        llm.stream(PROMPT, hurry=True)


def test_log_probabilities_are_those_of_transformers(llm: LLM, model: Path) -> None:
    [done] = llm.generate([PROMPT], max_tokens=6, logprobs=3, prompt_logprobs=2, **GREEDY)
    ids = PROMPT + done.token_ids
    with torch.no_grad():
        wanted = load_reference(model)(torch.tensor([ids])).logits[0].log_softmax(-1)
    told = [*done.prompt_logprobs, *done.logprobs]
    assert [each.token_id for each in told] == ids
    assert told[0].logprob is None and told[0].top == ()
    for position, each in enumerate(told[1:]):
        assert each.logprob == pytest.approx(float(wanted[position, each.token_id]), abs=1e-3)
        likeliest = wanted[position].topk(len(each.top))
        assert [one.token_id for one in each.top] == likeliest.indices.tolist()
    assert [len(each.top) for each in told[1:]] == [2] * 3 + [3] * 6
    assert b"".join(each.data for each in done.logprobs).decode(errors="replace") == done.text


def test_several_completions_of_a_prompt_have_seeds_of_their_own(llm: LLM) -> None:
    many = llm.generate([PROMPT, [9, 9]], max_tokens=8, n=3, seed=5, ignore_eos=True)
    assert len(many) == 6
    for index in range(3):
        alone = llm.generate([PROMPT], max_tokens=8, seed=5 + index, ignore_eos=True)[0]
        assert many[index].token_ids == alone.token_ids
    streamed: list[list[int]] = [[], [], []]
    for part in llm.stream(PROMPT, max_tokens=8, n=3, seed=5, ignore_eos=True):
        streamed[part.index] += part.token_ids
    assert streamed == [each.token_ids for each in many[:3]]
    with pytest.raises(InvalidRequest, match="one answer"):
        llm.chat([{"role": "user", "content": "hello"}], n=2)


def test_bias_and_least_length_change_what_is_chosen(llm: LLM) -> None:
    [biased] = llm.generate([PROMPT], max_tokens=5, logit_bias={77: 100.0}, **GREEDY)
    assert biased.token_ids == [77] * 5
    [freed] = llm.generate([PROMPT], max_tokens=5, logit_bias={77: 100.0}, presence_penalty=2, **GREEDY)
    assert freed.token_ids[0] == 77
    [stopped] = llm.generate(
        [PROMPT], max_tokens=9, logit_bias={77: 100.0}, stop_token_ids=(77,), temperature=0
    )
    [longer] = llm.generate(
        [PROMPT], max_tokens=9, logit_bias={77: 100.0}, stop_token_ids=(77,), min_tokens=4, temperature=0
    )
    assert stopped.finish_reason == longer.finish_reason == "stop"
    assert (len(stopped.token_ids), len(longer.token_ids)) == (1, 5)


def test_text_becomes_token_ids_and_back(demo: LLM) -> None:
    ids = demo.encode("Kubernetes is", add_special_tokens=False)
    assert demo.decode(ids) == "Kubernetes is" and demo.decode([]) == ""
    with pytest.raises(InvalidRequest, match="vocabulary"):
        demo.decode([10**6])


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "ready": {"type": "boolean"}},
    "required": ["name", "ready"],
    "additionalProperties": False,
}


def test_answers_match_what_they_must(demo: LLM) -> None:
    options: dict[str, Any] = {"temperature": 1.5, "seed": 3, "max_tokens": 900}
    for done in demo.generate(["A pod: "], json_schema=SCHEMA, n=4, **options):
        assert done.finish_reason == "stop"
        jsonschema.validate(json.loads(done.text), SCHEMA)
    [date] = demo.generate(["Today is "], regex=r"[0-9]{4}-[01][0-9]", **options)
    assert re.fullmatch(r"[0-9]{4}-[01][0-9]", date.text)
    choices = ("yes", 'say "no"', "Ünklar\n")
    chosen = {each.text for each in demo.generate(["Is it? "], choice=choices, n=8, **options)}
    assert chosen <= set(choices) and len(chosen) > 1
    [counted] = demo.generate(["Count: "], grammar='root ::= "1" ("," [0-9])* "."', **options)
    assert re.fullmatch(r"1(,[0-9])*\.", counted.text)


def test_a_grammar_that_cannot_be_compiled_is_refused_and_harms_none(demo: LLM) -> None:
    with pytest.raises(RequestError):
        demo.generate(["x"], regex="(", max_tokens=4)
    with pytest.raises(RequestError):
        demo.generate(["x"], json_schema={"type": "nonsense"}, max_tokens=4)
    assert demo.generate(["x"], max_tokens=2, ignore_eos=True)[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"temperature": 2.1}, "temperature must be a number from 0.0 to 2.0"),
        ({"temperature": math.nan}, "temperature"),
        ({"seed": 1 << 63}, "seed"),
        ({"top_k": -2}, "top_k must be a whole number from -1"),
        ({"n": 0}, "n must be"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens is 5"),
        ({"logprobs": 21}, "logprobs must be a whole number from 0 to 20"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty must be a number above 0"),
        ({"logit_bias": {1: 101}}, "logit_bias maps"),
        ({"logit_bias": {"1": 5}}, "logit_bias maps"),
        ({"stop": ("x",) * 17}, "stop has 17 entries"),
        ({"stop": ("x" * 257,)}, "256 characters"),
        ({"regex": "a", "choice": ("a",)}, "only one of regex and choice"),
        ({"choice": ()}, "choice must be"),
        ({"json_schema": 5}, "json_schema cannot be 5"),
    ],
)
def test_options_that_cannot_be_served_are_named(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidRequest, match=complaint):
        Sampling(**options)


def test_extreme_seeds_and_top_k_off_are_served(llm: LLM) -> None:
    for seed in (-(1 << 63), (1 << 63) - 1):
        options: dict[str, Any] = {"seed": seed, "top_k": -1, "n": 2, "max_tokens": 3, "ignore_eos": True}
        assert [len(each.token_ids) for each in llm.generate([PROMPT], **options)] == [3, 3]
    with pytest.raises(InvalidRequest, match="stop_token_ids: token id"):
        llm.generate([PROMPT], stop_token_ids=(10**6,))
