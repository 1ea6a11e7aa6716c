"""Features of ``LLM`` beyond plain text: streams, log-probabilities, n completions, structured output, token ids."""

import gc
import json
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

pytestmark = pytest.mark.integration

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


def test_deltas_of_a_stream_add_up_to_the_completion(llm: LLM) -> None:
    [whole] = llm.generate([PROMPT], max_tokens=20, **GREEDY)
    parts = list(llm.stream(PROMPT, max_tokens=20, **GREEDY))
    assert len(parts) == 20
    assert "".join(part.text for part in parts) == whole.text
    assert [token for part in parts for token in part.token_ids] == whole.token_ids
    assert [part.finish_reason for part in parts] == [None] * 19 + ["length"]
    assert parts[-1].prompt_tokens == 4


def test_completions_keep_none_of_their_deltas(llm: LLM) -> None:
    """Hundreds of thousands of small objects would delay the end of a long call and trigger garbage collections."""
    kept: list[int] = []

    def count(_: int) -> None:
        kept.append(sum(type(each) is CompletionDelta for each in gc.get_objects()))

    llm.generate([PROMPT, [7, 7]], max_tokens=20, on_progress=count, **GREEDY)
    assert len(kept) >= 20 and max(kept) <= kept[0] + 4  # two steps of two rows


def test_two_streams_can_be_read_in_turn_with_other_calls_between(llm: LLM) -> None:
    [one, two] = llm.generate([PROMPT, [7, 7]], max_tokens=9, **GREEDY)
    first, second = (llm.stream(each, max_tokens=9, **GREEDY) for each in (PROMPT, [7, 7]))
    read = [(next(first).token_ids, next(second).token_ids) for _ in range(4)]
    assert llm.generate([[3, 4]], max_tokens=2, **GREEDY)[0].finish_reason == "length"
    read += [(a.token_ids, b.token_ids) for a, b in zip(first, second, strict=True)]
    assert [token for pair, _ in read for token in pair] == one.token_ids
    assert [token for _, pair in read for token in pair] == two.token_ids


def test_closing_a_stream_aborts_its_request(llm: LLM) -> None:
    left = llm.stream(PROMPT, max_tokens=400, **GREEDY)
    next(left)
    left.close()
    [after] = llm.generate([PROMPT], max_tokens=2, **GREEDY)  # receives the aborted request's last row, too
    assert len(after.token_ids) == 2
    assert llm._tracker.num_in_flight == 0


def test_conversation_can_be_streamed(demo: LLM) -> None:
    messages = [{"role": "user", "content": "What is a pod?"}]
    answer = demo.chat(messages, max_tokens=12, temperature=0)
    assert "".join(each.text for each in demo.stream(messages, max_tokens=12, temperature=0)) == answer.text


def test_stream_refuses_an_invalid_prompt_at_once(llm: LLM) -> None:
    with pytest.raises(RequestError, match="empty"):
        llm.stream([])
    with pytest.raises(InvalidRequest, match="no option 'hurry'"):
        llm.stream(PROMPT, hurry=True)


def test_logprobs_equal_those_of_transformers(llm: LLM, model: Path) -> None:
    [done] = llm.generate([PROMPT], max_tokens=6, logprobs=3, prompt_logprobs=2, **GREEDY)
    ids = PROMPT + done.token_ids
    with torch.no_grad():
        wanted = load_reference(model)(torch.tensor([ids])).logits[0].log_softmax(-1)
    found = [*done.prompt_logprobs, *done.logprobs]
    assert [each.token_id for each in found] == ids
    assert found[0].logprob is None and found[0].top == ()
    for position, each in enumerate(found[1:]):
        assert each.logprob == pytest.approx(float(wanted[position, each.token_id]), abs=1e-3)
        likeliest = wanted[position].topk(len(each.top))
        assert [one.token_id for one in each.top] == likeliest.indices.tolist()
    assert [len(each.top) for each in found[1:]] == [2] * 3 + [3] * 6
    assert b"".join(each.data for each in done.logprobs).decode(errors="replace") == done.text


def test_n_completions_of_a_prompt_have_consecutive_seeds(llm: LLM) -> None:
    many = llm.generate([PROMPT, [9, 9]], max_tokens=8, n=3, seed=5, ignore_eos=True)
    assert len(many) == 6
    for index in range(3):
        alone = llm.generate([PROMPT], max_tokens=8, seed=5 + index, ignore_eos=True)[0]
        assert many[index].token_ids == alone.token_ids
    streamed: list[list[int]] = [[], [], []]
    for part in llm.stream(PROMPT, max_tokens=8, n=3, seed=5, ignore_eos=True):
        streamed[part.index] += part.token_ids
    assert streamed == [each.token_ids for each in many[:3]]
    with pytest.raises(InvalidRequest, match="one completion"):
        llm.chat([{"role": "user", "content": "hello"}], n=2)


def test_logit_bias_and_min_tokens_change_the_tokens(llm: LLM) -> None:
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


def test_encode_and_decode_are_inverse(demo: LLM) -> None:
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


def test_structured_outputs_match_their_constraint(demo: LLM) -> None:
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


def test_invalid_grammar_fails_its_call_but_no_later_one(demo: LLM) -> None:
    with pytest.raises(RequestError):
        demo.generate(["x"], regex="(", max_tokens=4)
    with pytest.raises(RequestError):
        demo.generate(["x"], json_schema={"type": "nonsense"}, max_tokens=4)
    assert demo.generate(["x"], max_tokens=2, ignore_eos=True)[0].finish_reason == "length"


def test_extreme_seeds_and_disabled_top_k_are_served(llm: LLM) -> None:
    for seed in (-(1 << 63), (1 << 63) - 1):
        options: dict[str, Any] = {"seed": seed, "top_k": -1, "n": 2, "max_tokens": 3, "ignore_eos": True}
        assert [len(each.token_ids) for each in llm.generate([PROMPT], **options)] == [3, 3]
    with pytest.raises(InvalidRequest, match="stop_token_ids: token id"):
        llm.generate([PROMPT], stop_token_ids=(10**6,))
