"""The offline ``LLM`` over real rank processes: completions, errors, and refused options."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from engine_driver import DEVICE
from llm_ranks import ranks_of
from tiny_models import greedy_tokens, load_reference, make_model
from transformers import AutoTokenizer

from skiff_runtime import LLM
from skiff_runtime.errors import (
    ConfigError,
    InvalidRequest,
    ModelError,
    RequestError,
    StartupError,
    Unavailable,
)
from skiff_runtime.offline.sampling_params import SamplingParams

pytestmark = pytest.mark.integration

PROMPTS = [[1, 5, 9, 20 + index] for index in range(6)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("llm"), "qwen3")


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), device=DEVICE, tp_size=2, max_total_tokens=1024, page_size=4) as made:
        yield made


def test_greedy_tokens_equal_those_of_transformers(llm: LLM, model: Path) -> None:
    reference = load_reference(model)
    done = llm.generate(PROMPTS, max_tokens=12, temperature=0, ignore_eos=True)
    assert [each.token_ids for each in done] == [greedy_tokens(reference, prompt, 12) for prompt in PROMPTS]
    assert {each.finish_reason for each in done} == {"length"}
    assert [each.prompt_tokens for each in done] == [4] * len(PROMPTS)


def test_single_prompt_needs_no_list(llm: LLM) -> None:
    text = llm.generate("hello", max_tokens=4, temperature=0, ignore_eos=True, progress=True)
    ids = llm.generate([1, 2, 3], max_tokens=4, temperature=0, ignore_eos=True)
    assert len(text) == len(ids) == 1
    assert ids[0].prompt_tokens == 3


def test_each_prompt_can_have_its_own_sampling_params(llm: LLM) -> None:
    sampling_params = [SamplingParams(max_tokens=1 + index, ignore_eos=True) for index in range(len(PROMPTS))]
    done = llm.generate(PROMPTS, sampling_params, temperature=0)
    assert [len(each.token_ids) for each in done] == [1, 2, 3, 4, 5, 6]


def test_seed_gives_the_same_tokens_alone_and_in_a_batch(llm: LLM) -> None:
    alone = llm.generate([PROMPTS[0]], max_tokens=8, seed=7, ignore_eos=True)[0]
    together = llm.generate(PROMPTS, max_tokens=8, seed=7, ignore_eos=True)[0]
    other = llm.generate([PROMPTS[0]], max_tokens=8, seed=8, ignore_eos=True)[0]
    assert alone.token_ids == together.token_ids != other.token_ids


def test_stop_string_ends_a_completion_and_is_left_out_of_its_text(llm: LLM) -> None:
    whole = llm.generate([PROMPTS[1]], max_tokens=12, temperature=0, ignore_eos=True)[0]
    stop = whole.text[3:5]
    cut = llm.generate([PROMPTS[1]], max_tokens=12, temperature=0, ignore_eos=True, stop=(stop,))[0]
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.finish_reason == "stop"


def test_chat_renders_the_chat_template(llm: LLM, model: Path) -> None:
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "Grüße 🙂"},
        {"role": "user", "content": "What is a pod?"},
    ]
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    options: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    [expected] = llm.generate([ids], **options)
    answer = llm.chat(messages, **options)
    assert (answer.prompt_tokens, answer.token_ids) == (len(ids), expected.token_ids)


def test_invalid_prompt_fails_its_call_but_no_later_one(llm: LLM) -> None:
    with pytest.raises(RequestError, match="context"):
        llm.generate([[1, 2, 3], [1] * 600], max_tokens=4)
    with pytest.raises(InvalidRequest, match="vocabulary"):
        llm.generate([[10**6]], max_tokens=4)
    assert len(llm.generate(PROMPTS, max_tokens=2, ignore_eos=True)) == len(PROMPTS)


def test_failures_of_one_call_do_not_reach_the_next(model: Path) -> None:
    """The KV cache is too small for each of 700 requests, so their errors arrive in more than one batch."""
    with LLM(str(model), max_total_tokens=64) as llm:
        with pytest.raises(RequestError, match="KV cache"):
            llm.generate([[5] * 40] * 700, max_tokens=40)
        assert len(llm.generate(PROMPTS, max_tokens=2, ignore_eos=True)) == len(PROMPTS)


def test_chat_works_from_another_thread(llm: LLM) -> None:
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(llm.chat, [{"role": "user", "content": "hello"}], max_tokens=3, ignore_eos=True)
        assert len(asked.result().token_ids) == 3


def test_every_call_fails_after_a_rank_has_died(model: Path) -> None:
    with LLM(str(model), max_total_tokens=1024) as llm:
        [rank] = ranks_of(llm)
        rank.kill()
        for _ in range(2):
            with pytest.raises(Unavailable, match="rank0 was killed by SIGKILL"):
                llm.generate([1], max_tokens=1)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"pagesize": 4}, "pagesize"),
        ({"page_size": "4"}, "page_size"),
        ({"page_size": 4.5}, "page_size"),
        ({"device": "tpu"}, "device"),
        ({"tp_size": 0}, "--tp must be from 1"),
        ({"tp": 2}, "'tp' is now 'tp_size'"),
    ],
)
def test_invalid_option_is_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        LLM("demo://", **options)


def test_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere"):
        LLM(str(tmp_path / "nowhere"))


def test_truncated_weights_fail_the_start(tmp_path: Path) -> None:
    model = make_model(tmp_path, "llama", shard_size="10MB")
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(StartupError, match="rank0"):
        LLM(str(model))


def test_requests_in_flight_respect_the_limits_of_the_queue(model: Path) -> None:
    """The scheduler would refuse more of them. A prompt that is longer than --max-queued-tokens runs alone."""
    prompts = [*([index] * 6 for index in range(8)), [9] * 40]
    options: dict[str, Any] = {"max_running_requests": 1, "max_queued_tokens": 14, "max_total_tokens": 1024}
    with LLM(str(model), **options) as llm:
        done = llm.generate(prompts, max_tokens=3, ignore_eos=True)
    assert [len(each.token_ids) for each in done] == [3] * len(prompts)
