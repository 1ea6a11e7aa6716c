"""LoRA adapters of the offline ``LLM``: each prompt has the tokens of its own adapter; loads, unloads and refusals."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lora_models
import pytest
from tiny_models import greedy_tokens, load_reference, make_model

from skiff_runtime import LLM
from skiff_runtime.errors import ConfigError, InvalidRequest, ModelNotFound

pytestmark = pytest.mark.integration

PROMPT = [5, 17, 30, 9, 44, 12, 3]
COUNT = 8
NAMES = ("first", "second", "third")
GREEDY: dict[str, Any] = {"max_tokens": COUNT, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and its adapters, one of them too large."""
    directory = tmp_path_factory.mktemp("lora")
    make_model(directory / "model")
    for seed, name in enumerate(NAMES):
        lora_models.make_adapter(directory / name, directory / "model", seed=seed, r=2 + 2 * seed)
    lora_models.make_adapter(directory / "large", directory / "model", seed=9, r=32)
    return directory


@pytest.fixture(scope="module")
def expected(files: Path) -> dict[str | None, list[int]]:
    """The tokens of peft's model with each adapter, and of the model itself."""
    tokens: dict[str | None, list[int]] = {
        name: greedy_tokens(lora_models.load_adapted(files / "model", files / name), PROMPT, COUNT)
        for name in NAMES
    }
    tokens[None] = greedy_tokens(load_reference(files / "model"), PROMPT, COUNT)
    assert len(set(map(tuple, tokens.values()))) == len(tokens), "the adapters must differ"
    return tokens


@pytest.fixture(scope="module")
def llm(files: Path) -> Iterator[LLM]:
    """An LLM with two LoRA slots and three adapters: the first is loaded at the start, the others are loaded afterwards."""
    options: dict[str, Any] = {"max_loras": 2, "max_cpu_loras": 2, "max_lora_rank": 8, "dtype": "float32"}
    adapters = (f"first={files / 'first'}",)
    with LLM(str(files / "model"), lora=adapters, max_total_tokens=1024, page_size=4, **options) as made:
        for name in NAMES[1:]:
            made.load_lora_adapter(name, str(files / name))
        yield made


def tokens_of(llm: LLM, name: str | None) -> list[int]:
    return [*llm.generate(PROMPT, lora=name, **GREEDY)[0].token_ids]


def test_each_prompt_has_the_tokens_of_its_adapter(llm: LLM, expected: dict[str | None, list[int]]) -> None:
    names = [*NAMES, None] * 3
    done = llm.generate([PROMPT] * len(names), lora=names, **GREEDY)
    assert [each.token_ids for each in done] == [expected[name] for name in names]
    streamed = [token for delta in llm.stream(PROMPT, lora="second", **GREEDY) for token in delta.token_ids]
    assert streamed == expected["second"]


def test_all_kinds_of_calls_choose_adapters(llm: LLM) -> None:
    messages = [{"role": "user", "content": "What is a pod?"}]
    plain, adapted = (llm.chat(messages, lora=name, **GREEDY).token_ids for name in (None, "third"))
    assert plain != adapted
    [plain_vector], [adapted_vector] = (llm.embed(PROMPT, lora=name) for name in (None, "third"))
    assert plain_vector.tolist() != adapted_vector.tolist()
    scores = [llm.score("a pod", "a pod of whales", lora=name) for name in (None, "third")]
    assert scores[0] != scores[1]


def test_stream_goes_on_when_its_adapter_is_unloaded_or_replaced(
    llm: LLM, files: Path, expected: dict[str | None, list[int]]
) -> None:
    llm.load_lora_adapter("swapped", str(files / "first"))
    stream = llm.stream(PROMPT, lora="swapped", **GREEDY)
    tokens = [*next(stream).token_ids]
    llm.load_lora_adapter("swapped", str(files / "second"), load_inplace=True)
    assert tokens_of(llm, "swapped") == expected["second"]
    llm.unload_lora_adapter("swapped")
    tokens += [token for delta in stream for token in delta.token_ids]
    assert tokens == expected["first"]
    with pytest.raises(ModelNotFound, match=r"'swapped' is not loaded; these are: first, second, third"):
        llm.generate(PROMPT, lora="swapped")


def test_many_loads_and_unloads_leave_nothing_behind(
    llm: LLM, files: Path, expected: dict[str | None, list[int]]
) -> None:
    for turn in range(12):
        name = NAMES[turn % len(NAMES)]
        llm.load_lora_adapter("passing", str(files / name))
        assert tokens_of(llm, "passing") == expected[name]
        llm.unload_lora_adapter("passing")
    assert tokens_of(llm, None) == expected[None]


def test_bad_adapters_are_refused_and_the_others_go_on(
    llm: LLM, files: Path, expected: dict[str | None, list[int]]
) -> None:
    with pytest.raises(InvalidRequest, match="has rank 32, but --max-lora-rank is 8"):
        llm.load_lora_adapter("large", str(files / "large"))
    with pytest.raises(InvalidRequest, match="'first' is loaded already; set load_inplace"):
        llm.load_lora_adapter("first", str(files / "second"))
    with pytest.raises(InvalidRequest, match="'model' is the name of the served model"):
        llm.load_lora_adapter("model", str(files / "second"))
    with pytest.raises(ConfigError, match=r"there is no adapter_config\.json"):
        llm.load_lora_adapter("absent", str(files / "absent"))
    with pytest.raises(InvalidRequest, match="2 prompts need one adapter or 2, not 3"):
        llm.generate([PROMPT, PROMPT], lora=["first", None, "second"])
    with pytest.raises(ModelNotFound):
        llm.unload_lora_adapter("absent")
    assert tokens_of(llm, "first") == expected["first"]


def test_adapter_that_cannot_be_served_is_an_error_at_the_start(files: Path) -> None:
    with pytest.raises(ConfigError, match=r"lora large=.* has rank 32"):
        LLM(str(files / "model"), lora=(f"large={files / 'large'}",), max_total_tokens=1024)


def test_without_lora_no_adapter_can_be_loaded(files: Path) -> None:
    with LLM(str(files / "model"), max_total_tokens=1024) as llm:
        with pytest.raises(InvalidRequest, match="enable_lora=True"):
            llm.load_lora_adapter("first", str(files / "first"))
        with pytest.raises(ModelNotFound, match="no adapter is"):
            llm.generate(PROMPT, lora="first")
