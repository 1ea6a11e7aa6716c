"""Greedy answers of a published checkpoint (SmolLM2-135M-Instruct) equal those of transformers, near ties aside.

``make test-integration`` takes every fiftieth of the 200 prompts, ``make checkpoint`` all of them. transformers reads
the same GGUF file. Each token is compared with transformers' choice after the tokens before it. Where the two differ, it
must be a near tie: models whose weights are perturbed by rounding errors choose both tokens there.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from engine_driver import DEVICE
from gguf_models import load_gguf_reference
from smollm2 import PERTURBED_MODELS, perturb, read_prompts, render_chat, smollm2
from tiny_models import greedy_tokens, oracle_logits

from skiff_runtime import LLM

pytestmark = pytest.mark.integration

TOKENS = 48
BATCH = 10
END_ID = 2
FEW = slice(None, None, 50)


@dataclass(frozen=True)
class Divergence:
    """A prompt with the output up to a place where the two choose ``tokens``."""

    ids: list[int]
    tokens: tuple[int, int]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    options: dict[str, Any] = {"max_model_len": 512, "max_running_requests": 32, "max_total_tokens": 16384}
    with LLM(str(smollm2()), device=DEVICE, dtype="float32", **options) as made:
        yield made


@pytest.fixture(scope="module")
def reference() -> Any:
    return load_gguf_reference(smollm2())


def compare(reference: Any, prompts: Sequence[list[int]], outputs: Sequence[list[int]]) -> list[Divergence]:
    """Return the first divergence of each output from transformers' choices."""
    found = []
    order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
    for start in range(0, len(order), BATCH):
        batch = order[start : start + BATCH]
        chosen = oracle_logits(reference, [prompts[n] for n in batch], [outputs[n] for n in batch])
        for number, logits in zip(batch, chosen, strict=True):
            choices = logits.argmax(-1).tolist()
            pairs = enumerate(zip(outputs[number], choices, strict=True))
            at = next((place for place, (ours, theirs) in pairs if ours != theirs), None)
            if at is not None:
                ids = [*prompts[number], *outputs[number][:at]]
                found.append(Divergence(ids, (outputs[number][at], choices[at])))
    return found


@torch.inference_mode()
def near_ties(
    reference: Any, divergences: Sequence[Divergence], models: int = PERTURBED_MODELS
) -> list[Divergence]:
    """Return the divergences at which as many perturbed models choose both tokens, and no third one."""
    original = {name: weight.detach().clone() for name, weight in reference.named_parameters()}
    seen: list[set[int]] = [set() for _ in divergences]
    for seed in range(models):
        perturb(reference, original, seed)
        for tokens, divergence in zip(seen, divergences, strict=True):
            tokens.add(int(reference(torch.tensor([divergence.ids])).logits[0, -1].argmax()))
    for name, weight in reference.named_parameters():
        weight.copy_(original[name])
    return [each for tokens, each in zip(seen, divergences, strict=True) if tokens == set(each.tokens)]


def check_prompts(llm: LLM, reference: Any, prompts: Sequence[str]) -> int:
    """Compare greedy answers to ``prompts``, and return how many of them diverged at a near tie."""
    ids = [llm.encode(render_chat(prompt), add_special_tokens=False) for prompt in prompts]
    done = llm.generate(ids, max_tokens=TOKENS, temperature=0, ignore_eos=True)
    outputs = [each.token_ids for each in done]
    assert [len(output) for output in outputs] == [TOKENS] * len(prompts)
    divergences = compare(reference, ids, outputs)
    ties = near_ties(reference, divergences) if divergences else []
    assert [each for each in divergences if each not in ties] == []
    return len(ties)


def test_greedy_answers_equal_transformers_on_a_few_prompts(llm: LLM, reference: Any) -> None:
    assert check_prompts(llm, reference, read_prompts()[FEW]) <= 1


@pytest.mark.checkpoint
@pytest.mark.timeout(3600)
def test_greedy_answers_equal_transformers_on_all_prompts(llm: LLM, reference: Any) -> None:
    prompts = read_prompts()
    assert len(set(prompts)) == 200
    assert check_prompts(llm, reference, prompts) <= 10


@pytest.mark.checkpoint
def test_comparison_sees_a_wrong_token(llm: LLM, reference: Any) -> None:
    [prompt] = [llm.encode(render_chat(read_prompts()[0]), add_special_tokens=False)]
    right = greedy_tokens(reference, prompt, 8)
    wrong = [*right[:5], right[5] + 1, *right[6:]]
    assert compare(reference, [prompt], [right]) == []
    [divergence] = compare(reference, [prompt], [wrong])
    assert divergence.tokens == (right[5] + 1, right[5])
    assert near_ties(reference, [divergence], models=1) == []


def test_answer_ends_with_the_models_end_token(llm: LLM, reference: Any) -> None:
    """The chat template of the file renders the prompt that the comparison above renders by hand."""
    question = "What is the capital of France? Answer with one word."
    answer = llm.chat([{"role": "user", "content": question}], max_tokens=64, temperature=0)
    prompt = llm.encode(render_chat(question), add_special_tokens=False)
    assert answer.prompt_tokens == len(prompt)
    assert answer.finish_reason == "stop" and "Paris" in answer.text
    shown = [token for token in answer.token_ids if token != END_ID]
    assert llm.decode(shown) == answer.text
    assert compare(reference, [prompt], [[*shown, END_ID]]) == []
