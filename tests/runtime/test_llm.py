"""The offline class, over real rank processes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_models import greedy_tokens, load_reference, make_model

from skiff_runtime import LLM
from skiff_runtime.errors import ConfigError, InvalidRequest, ModelError, RequestError, StartupError
from skiff_runtime.sampling import Sampling

PROMPTS = [[1, 5, 9, 20 + index] for index in range(6)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("llm"), "qwen3")


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), tp=2, kv_cache_tokens=1024, page_size=4) as made:
        yield made


def test_tokens_equal_transformers(llm: LLM, model: Path) -> None:
    reference = load_reference(model)
    done = llm.generate(PROMPTS, max_tokens=12, temperature=0, ignore_eos=True)
    assert [each.token_ids for each in done] == [greedy_tokens(reference, prompt, 12) for prompt in PROMPTS]
    assert {each.finish_reason for each in done} == {"length"}
    assert [each.prompt_tokens for each in done] == [4] * len(PROMPTS)


def test_one_prompt_may_stand_alone(llm: LLM) -> None:
    text = llm.generate("hello", max_tokens=4, temperature=0, ignore_eos=True)
    ids = llm.generate([1, 2, 3], max_tokens=4, temperature=0, ignore_eos=True)
    assert len(text) == len(ids) == 1
    assert ids[0].prompt_tokens == 3


def test_each_prompt_may_have_its_own_sampling(llm: LLM) -> None:
    sampling = [Sampling(max_tokens=1 + index, ignore_eos=True) for index in range(len(PROMPTS))]
    done = llm.generate(PROMPTS, sampling, temperature=0)
    assert [len(each.token_ids) for each in done] == [1, 2, 3, 4, 5, 6]


def test_a_seed_gives_the_same_tokens_in_any_company(llm: LLM) -> None:
    alone = llm.generate([PROMPTS[0]], max_tokens=8, seed=7, ignore_eos=True)[0]
    together = llm.generate(PROMPTS, max_tokens=8, seed=7, ignore_eos=True)[0]
    other = llm.generate([PROMPTS[0]], max_tokens=8, seed=8, ignore_eos=True)[0]
    assert alone.token_ids == together.token_ids != other.token_ids


def test_a_stop_string_ends_a_completion_and_is_not_shown(llm: LLM) -> None:
    whole = llm.generate([PROMPTS[1]], max_tokens=12, temperature=0, ignore_eos=True)[0]
    stop = whole.text[3:5]
    cut = llm.generate([PROMPTS[1]], max_tokens=12, temperature=0, ignore_eos=True, stop=(stop,))[0]
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.finish_reason == "stop"


def test_chat_renders_the_template(llm: LLM) -> None:
    answer = llm.chat([{"role": "user", "content": "hello"}], max_tokens=3, temperature=0, ignore_eos=True)
    assert len(answer.token_ids) == 3


def test_a_prompt_that_cannot_be_served_harms_no_later_one(llm: LLM) -> None:
    with pytest.raises(RequestError, match="context"):
        llm.generate([[1, 2, 3], [1] * 600], max_tokens=4)
    with pytest.raises(InvalidRequest, match="vocabulary"):
        llm.generate([[10**6]], max_tokens=4)
    assert len(llm.generate(PROMPTS, max_tokens=2, ignore_eos=True)) == len(PROMPTS)


@pytest.mark.parametrize(
    "name,value", [("top_p", 0.0), ("temperature", -1.0), ("max_tokens", 0), ("seed", -1)]
)
def test_impossible_sampling_is_named(name: str, value: float) -> None:
    with pytest.raises(InvalidRequest, match=name):
        Sampling(**{name: value})  # type: ignore[arg-type]


def test_unknown_options_are_named() -> None:
    with pytest.raises(ConfigError, match="pagesize"):
        LLM("demo://", pagesize=4)


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere"):
        LLM(str(tmp_path / "nowhere"))


def test_weights_that_are_cut_off_end_the_start_with_an_error(tmp_path: Path) -> None:
    model = make_model(tmp_path, "llama", shard_size="10MB")
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(StartupError, match="rank0"):
        LLM(str(model))
