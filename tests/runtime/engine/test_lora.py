"""Tokens of requests with LoRA adapters equal those of peft, for one, several and mixed adapters in one batch."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from gpus import needs_gpus
from lora_models import ALL, ATTENTION, load_adapted, make_adapter, merge
from rank_processes import on_ranks, single_rank
from scheduler_bench import generate
from serving_engine import Served, serve, serve_on_rank
from tiny_models import load_reference, make_model, oracle_choices, oracle_logits
from tiny_tokenizer import VOCAB_SIZE

from skiff_runtime.kernels.tuning import HOPPER, overridden
from skiff_runtime.messages import GenerateRequest

FAMILIES: Final = ("llama", "qwen2", "qwen3", "qwen3_moe", "mistral")
TOKENS: Final = 12
SETTINGS: Final[dict[str, Any]] = {
    "page_size": 4,
    "max_num_batched_tokens": 24,
    "max_loras": 2,
    "max_lora_rank": 16,
    "max_cpu_loras": 4,
}
"""Fewer slots than adapters, and a budget that cuts prompts and mixes them with decode rows."""


@dataclass
class Family:
    """A model, its adapters with ids from 1 on, and their references, by the adapter's id."""

    path: Path
    adapters: list[Path] = field(default_factory=list)
    references: list[Any] = field(default_factory=list)

    def requests(self, ids: Sequence[int], **sampling: Any) -> list[GenerateRequest]:
        """Return a request for each of the adapters' ``ids``, 0 for the base; their prompts have common beginnings."""
        random = np.random.default_rng(3)
        stem = random.integers(2, VOCAB_SIZE, 8).tolist()
        return [
            generate(
                uid,
                stem + random.integers(2, VOCAB_SIZE, 3 + 2 * uid).tolist(),
                max_tokens=TOKENS,
                adapter_id=adapter,
                **sampling,
            )
            for uid, adapter in enumerate(ids)
        ]


def build(directory: Path, name: str) -> Family:
    """Make a model of the family and adapters of different ranks, modules, scales and dtypes."""
    family = Family(make_model(directory / "model", name, seed=5))
    path = family.path
    options: list[dict[str, Any]] = [
        {"modules": ALL, "r": 4},
        {"modules": ("q_proj", "v_proj"), "r": 16, "use_rslora": True, "lora_alpha": 16},
        {"modules": ATTENTION, "r": 3, "rank_pattern": {"k_proj": 7}, "alpha_pattern": {"o_proj": 3}},
        {"modules": ("down_proj", "gate_proj", "o_proj"), "r": 8, "layers_to_transform": [1]},
    ]
    family.references.append(load_reference(path))
    for number, option in enumerate(options, 1):
        if name == "qwen3_moe":  # for peft its other modules are experts, which are not served
            option["modules"] = [each for each in option["modules"] if each in ATTENTION]
        family.adapters.append(make_adapter(directory / str(number), path, seed=number, **option))
        family.references.append(load_adapted(path, family.adapters[-1]))
    return family


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Family]:
    return {name: build(tmp_path_factory.mktemp(name), name) for name in FAMILIES}


def prompt_of(request: GenerateRequest) -> list[int]:
    tokens: list[int] = np.frombuffer(request.token_ids, np.int32).tolist()
    return tokens


def check(family: Family, requests: Sequence[GenerateRequest], served: Served) -> None:
    """Check that every token is the greedy choice of the request's own reference, and of no other one."""
    for request in requests:
        output = [served.replies[request.uid].tokens]
        assert len(output[0]) == TOKENS
        prompt = [prompt_of(request)]
        assert output == oracle_choices(family.references[request.adapter_id], prompt, output)
        others = [each for number, each in enumerate(family.references) if number != request.adapter_id]
        assert all(oracle_choices(other, prompt, output) != output for other in others)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("ids", [(1,), (1, 2), (0, 1, 0, 2, 3, 4, 1, 0, 4, 2)], ids=["one", "two", "mixed"])
def test_greedy_tokens_equal_peft(families: dict[str, Family], name: str, ids: tuple[int, ...]) -> None:
    family = families[name]
    requests = family.requests(ids)
    served = serve(family.path, requests, adapters=family.adapters, **SETTINGS)
    check(family, requests, served)
    assert served.lost_pages == 0


@contextmanager
def append(**limits: int) -> Iterator[None]:
    """Append A of all slots to the base matrix on a CPU as well, by the limits of GPUs but for these."""
    appended = replace(HOPPER.lora.appended, **limits)
    with overridden(replace(HOPPER, lora=replace(HOPPER.lora, appended=appended))):
        yield


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_equal_peft_where_a_is_appended_to_the_base(
    families: dict[str, Family], name: str
) -> None:
    family = families[name]
    requests = family.requests((0, 1, 0, 2, 3, 4, 1, 0, 4, 2))
    with append():
        served = serve(family.path, requests, adapters=family.adapters, **SETTINGS)
    check(family, requests, served)


@pytest.mark.parametrize("max_elements", [0, 16, 48])
def test_steps_with_and_without_appended_a_follow_each_other(
    families: dict[str, Family], max_elements: int
) -> None:
    """Steps of no, one, or up to three tokens multiply by it."""
    family = families["qwen2"]
    requests = family.requests((0, 1, 2, 3, 4))
    with append(max_elements=max_elements):
        served = serve(family.path, requests, adapters=family.adapters, **SETTINGS)
    check(family, requests, served)


def test_biases_of_all_projections_are_added_once(tmp_path: Path) -> None:
    """Behind the bias of a matrix with appended rows there are zeros."""
    path = make_model(tmp_path / "model", "llama", seed=5, attention_bias=True, mlp_bias=True)
    adapter = make_adapter(tmp_path / "adapter", path, seed=1, modules=ALL, r=5)
    family = Family(path, [adapter], [load_reference(path), load_adapted(path, adapter)])
    requests = family.requests((1, 0, 1))
    with append():
        served = serve(path, requests, adapters=family.adapters, **{**SETTINGS, "max_lora_rank": 5})
    check(family, requests, served)


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_equal_merged_weights(families: dict[str, Family], name: str) -> None:
    family = families[name]
    requests = family.requests((1, 2, 3, 4))
    served = serve(family.path, requests, adapters=family.adapters, **SETTINGS)
    for request in requests:
        merged = merge(family.path, family.adapters[request.adapter_id - 1])
        output = [served.replies[request.uid].tokens]
        assert output == oracle_choices(merged, [prompt_of(request)], output)


@needs_gpus(2)
@pytest.mark.parametrize("name", ("llama", "qwen3_moe"))
def test_two_ranks_generate_the_same_tokens(families: dict[str, Family], name: str, tmp_path: Path) -> None:
    family = families[name]
    requests = family.requests((0, 1, 2, 3, 4, 1))
    options = {"adapters": family.adapters, **SETTINGS}
    first, second = on_ranks(2, tmp_path / "run", serve_on_rank, family.path, requests, [options])
    check(family, requests, first[0])
    assert first[0].checksum == second[0].checksum


def test_log_probabilities_equal_those_of_peft(families: dict[str, Family]) -> None:
    family = families["llama"]
    requests = family.requests((1, 0, 2), logprobs=3, prompt_logprobs=1)
    served = serve(family.path, requests, adapters=family.adapters, **SETTINGS)
    for request in requests:
        reply, prompt = served.replies[request.uid], prompt_of(request)
        reference = family.references[request.adapter_id]
        [logits] = oracle_logits(reference, [prompt], [reply.tokens])
        exact = logits.log_softmax(-1)
        for row, (token, value, top_ids, top) in zip(exact, reply.logprobs, strict=True):
            assert value == pytest.approx(float(row[token]), abs=1e-4)
            assert top_ids == row.topk(3).indices.tolist()
            assert top == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
        [known] = oracle_logits(reference, [prompt[:1]], [prompt[1:]])
        found = [value for _, value, _, _ in reply.prompt_logprobs[1:]]
        expected = known.log_softmax(-1).gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        assert found == pytest.approx(expected.tolist(), abs=1e-4)


def test_sampled_tokens_do_not_depend_on_the_batch(families: dict[str, Family]) -> None:
    family = families["qwen3"]
    requests = family.requests((1, 0, 2, 3, 1), temperature=1.0, seed=7)
    together = serve(family.path, requests, adapters=family.adapters, **SETTINGS)
    for request in requests:
        alone = serve(family.path, [request], adapters=family.adapters, **SETTINGS)
        assert alone.replies[request.uid].tokens == together.replies[request.uid].tokens


def test_rows_of_the_base_are_those_of_a_service_without_lora(families: dict[str, Family]) -> None:
    family = families["llama"]
    requests = family.requests((0, 0, 0), logprobs=1)
    with_lora = serve(family.path, requests, adapters=family.adapters, **SETTINGS)
    without = serve(family.path, requests, page_size=4, max_num_batched_tokens=24)
    for request in requests:
        assert with_lora.replies[request.uid].logprobs == without.replies[request.uid].logprobs


@pytest.mark.parametrize("tp_size", (1, pytest.param(2, marks=needs_gpus(2))))
def test_log_probabilities_in_fp8_are_nearest_to_those_of_the_adapter(
    families: dict[str, Family], tp_size: int, tmp_path: Path
) -> None:
    """An error of FP8 is below half of the distance to any other adapter; a row of the base is as without LoRA.

    The fourth adapter, of one layer, changes less than FP8 does and is left out.
    """
    family = families["llama"]
    requests = family.requests((0, 1, 2, 3, 1), logprobs=1)
    settings = {"quantization": "fp8", **SETTINGS}
    runs = [{"adapters": family.adapters, **settings}, settings]
    if tp_size == 1:
        [served] = serve_on_rank(single_rank(), family.path, requests[:1], runs[1:])
        [with_lora] = serve_on_rank(single_rank(), family.path, requests, runs[:1])
        found, expected = with_lora.replies[0].logprobs, served.replies[0].logprobs
        assert [each[0] for each in found] == [each[0] for each in expected]
        assert [each[1] for each in found] == pytest.approx([each[1] for each in expected], abs=1e-4)
    else:
        [[with_lora], _] = on_ranks(2, tmp_path / "run", serve_on_rank, family.path, requests, runs[:1])
    for request in requests:
        reply, prompt = with_lora.replies[request.uid], [prompt_of(request)]
        tokens, values = reply.tokens, torch.tensor([value for _, value, _, _ in reply.logprobs])
        errors = []
        for reference in family.references[:4]:
            [logits] = oracle_logits(reference, prompt, [tokens])
            known = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
            errors.append(float((known - values).abs().mean()))
        own = errors.pop(request.adapter_id)
        assert own < 0.5 * min(errors), (own, errors)
