"""Tensor parallelism: several ranks generate the tokens of one rank and of transformers, and all ranks do the same.

The ranks are GPUs (NCCL) with ``SKIFF_TEST_DEVICE=cuda``, otherwise processes on a CPU (gloo).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from bf16_engine import error_of, known_logits, make_wide_model, tie_of
from gpus import ON_GPU, needs_gpus
from grammar_factory import GrammarFactory
from rank_functions import (
    collectives,
    generated,
    generated_by_exchanges,
    generated_greedy,
    sampled_with_every_parameter,
)
from rank_processes import RankPool, single_rank
from scheduler_bench import Replies, request
from serving_engine import Served, serve_on_rank
from tiny_models import MOE_FAMILIES, load_reference, make_model, oracle_choices, oracle_logits
from tiny_tokenizer import VOCAB_SIZE

from skiff_runtime.messages import FinishReason, GenerateRequest, SamplingSpec

pytestmark = [needs_gpus(2), *([pytest.mark.gpu] if ON_GPU else [])]
FULL: Final = () if ON_GPU else (pytest.mark.soak,)
"""On a CPU these are for ``make soak``, beside others of their kind in ``make test``."""

COUNT: Final = 8
LENGTHS: Final = (90, 1, 5, 16, 33, 70, 12)
FAMILIES: Final = (
    pytest.param("llama", 2, marks=FULL),
    ("llama_tied", 1),
    ("qwen2", 1),
    pytest.param("qwen3", 2, marks=FULL),
    ("mistral", 2),
    ("qwen3_moe", 1),
    ("mixtral", 2),
)
"""Families with their number of KV heads: 2 are sharded over two ranks, 1 is replicated.

Those of ``FULL`` are served by two ranks in ``test_parity_transformers.py`` as well.
"""
LOGPROB_ERROR: Final = 2e-4
"""In nats, of float32 sums in another order."""


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    with RankPool(2, tmp_path_factory.mktemp("two")) as pool:
        yield pool


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    with RankPool(4, tmp_path_factory.mktemp("four")) as pool:
        yield pool


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """One thread in this process, as in each rank: the order of sums does not depend on the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random_prompts(seed: int = 0, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(2, VOCAB_SIZE, length).tolist() for length in lengths]


def test_collectives_of_two_ranks(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(collectives)
    assert first.pop("exchanged") == [[1.0, 0.0, 2.0, 0.0]]
    assert second.pop("exchanged") == [[10.0, 1.0, 20.0, 1.0]]
    assert first == second
    assert first == {
        "sum": [3.0, 3.0],
        "short": [3.0, 3.0],
        "dtype": "torch.bfloat16",
        "gathered": [[1.0, 0.0, 2.0, 0.0], [10.0, 1.0, 20.0, 1.0]],
        "maximum": [1, 0, -(1 << 63)],
        "minimum": 9,
    }


@pytest.mark.parametrize(("family", "kv_heads"), FAMILIES)
def test_two_ranks_generate_the_tokens_of_one_rank_and_of_transformers(
    two_ranks: RankPool, tmp_path: Path, family: str, kv_heads: int
) -> None:
    """In mixed steps, greedy and sampled. The vocabulary has an odd size; the first step samples no token."""
    path, prompts = make_model(tmp_path, family, seed=7, num_key_value_heads=kv_heads), random_prompts()
    first, second = two_ranks.run(generated, path, prompts, COUNT)
    assert first == second
    assert first == generated(single_rank(), path, prompts, COUNT)
    assert first[0] == oracle_choices(load_reference(path), prompts, first[0])


@pytest.mark.parametrize("length", [pytest.param(9, marks=FULL)])
def test_lone_request_gets_the_tokens_of_one_rank_and_of_transformers(
    two_ranks: RankPool, tmp_path: Path, length: int
) -> None:
    """In steps of one token, whose products are fused with their sums where GPUs have peer access."""
    path, prompts = make_model(tmp_path, "qwen3", seed=7, num_key_value_heads=2), random_prompts(9, (length,))
    first, second = two_ranks.run(generated, path, prompts, COUNT)
    assert first == second
    assert first == generated(single_rank(), path, prompts, COUNT)
    assert first[0] == oracle_choices(load_reference(path), prompts, first[0])


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_ranks_with_whole_experts_generate_the_tokens_of_transformers(
    two_ranks: RankPool, tmp_path: Path, family: str
) -> None:
    path, prompts = make_model(tmp_path, family, seed=13), random_prompts(2)
    settings = [{"tp_size": 2, "expert_parallel": True}]
    first, second = two_ranks.run(generated_greedy, path, prompts, COUNT, settings)
    assert first == second
    assert first[0] == oracle_choices(load_reference(path), prompts, first[0])


@pytest.mark.skipif(not ON_GPU, reason="only GPUs have copy engines")
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_ranks_that_exchange_by_copy_engines_generate_the_tokens_of_transformers(
    two_ranks: RankPool, tmp_path: Path, family: str
) -> None:
    """In prefill graphs and without graphs; a mixture's sums over experts are exchanged whole."""
    path, prompts = make_model(tmp_path, family, seed=17), random_prompts(3)
    first, second = two_ranks.run(generated_by_exchanges, path, prompts, COUNT)
    assert first == second
    reference = load_reference(path)
    for each in first:
        assert each["exchanges"]
        assert each["tokens"] == oracle_choices(reference, prompts, each["tokens"])


@needs_gpus(4)
@pytest.mark.parametrize("kv_heads", [pytest.param(2, marks=FULL)])
def test_four_ranks_replicate_two_kv_heads(four_ranks: RankPool, tmp_path: Path, kv_heads: int) -> None:
    path = make_model(tmp_path, "qwen3", seed=9, num_key_value_heads=kv_heads)
    prompts = random_prompts(lengths=(40, 1, 17))
    first, *others = four_ranks.run(generated, path, prompts, COUNT)
    assert others == [first] * 3
    assert first == generated(single_rank(), path, prompts, COUNT)
    assert first[0] == oracle_choices(load_reference(path), prompts, first[0])


@pytest.mark.parametrize("ranks", ["two_ranks", pytest.param("four_ranks", marks=(needs_gpus(4), *FULL))])
def test_ranks_sample_with_every_parameter_like_one_rank(
    request: pytest.FixtureRequest, tmp_path: Path, ranks: str
) -> None:
    """Greedy rows and draws, filters, processors, grammars and log-probabilities stand beside each other.

    Filtered rows are divided among the ranks, or gathered on every rank.
    """
    path, pool = (
        make_model(tmp_path, "qwen3", seed=11, num_key_value_heads=2),
        request.getfixturevalue(ranks),
    )
    for exchange_min_rows in (1, 1000):
        arguments: tuple[Path, int, int, dict[str, Any]] = (path, 12, exchange_min_rows, {})
        found = pool.run(sampled_with_every_parameter, *arguments)
        assert all(each == found[0] for each in found)
        alone = sampled_with_every_parameter(single_rank(), *arguments)
        assert found[0]["tokens"] == alone["tokens"]
        assert found[0]["logprob_rows"] == alone["logprob_rows"]
        for sharded, whole in zip(
            found[0]["logprobs"] + [each[2] for each in found[0]["prompts"]],
            alone["logprobs"] + [each[2] for each in alone["prompts"]],
            strict=True,
        ):
            assert sharded[0] == whole[0]
            for got, wanted in zip(sharded[1:], whole[1:], strict=True):
                np.testing.assert_allclose(got, wanted, atol=LOGPROB_ERROR)


def test_bfloat16_tokens_equal_transformers_but_for_near_ties(two_ranks: RankPool, tmp_path: Path) -> None:
    """The rule is that of one GPU: see ``test_greedy_tokens_equal_transformers_but_for_near_ties``."""
    path, prompts = make_wide_model(tmp_path, "qwen3"), random_prompts(3)
    first, second = two_ranks.run(generated, path, prompts, 3 * COUNT, "bfloat16")
    assert first == second
    outputs = first[0]
    rounded, exact = (
        torch.cat(known_logits(path, dtype, prompts, outputs)) for dtype in (torch.bfloat16, torch.float32)
    )
    chosen = torch.tensor(outputs).flatten()
    gaps = (rounded.amax(-1) - rounded.gather(1, chosen[:, None]).squeeze(1)) / rounded.abs().amax(-1)
    assert float(gaps.max()) <= tie_of(error_of(rounded, exact))
    different, unsure = (int((rounded.argmax(-1) != each).sum()) for each in (chosen, exact.argmax(-1)))
    assert different <= 2 * max(unsure, len(chosen) // 100)


@dataclass(frozen=True)
class Crowd:
    """A model and requests with all parameters, some of which share a prefix."""

    path: Path
    requests: list[GenerateRequest]
    patterns: dict[int, str]
    """Regular expression of each request with a grammar, by uid."""
    factory: GrammarFactory


PARAMETERS: Final[tuple[dict[str, Any], ...]] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 12, "logprobs": 2},
    {"temperature": 1.2, "top_p": 0.9, "seed": 1 << 63},
    {"temperature": 1.0, "min_p": 0.05, "prompt_logprobs": 3},
    {"temperature": 0.0, "repetition_penalty": 1.6, "logprobs": 0},
    {"temperature": 0.7, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"temperature": 0.0, "logit_bias": ((40, 5.0), (77, -3.0)), "min_tokens": 7, "prompt_logprobs": 0},
)
PATTERNS: Final = ("[a-f]{9,20}", "(yes|no|perhaps){2,5}")
ABORTED: Final = (1, 6)
PRESSURE: Final[dict[str, Any]] = {
    "max_total_tokens": 192,
    "max_num_batched_tokens": 32,
    "new_token_ratio": 0.1,
    "aborted": ABORTED,
}
"""Little memory: requests are preempted, cached prefixes evicted, and every prompt is computed in chunks beside others."""


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Crowd:
    path = make_model(tmp_path_factory.mktemp("crowd"), "qwen3", seed=37)
    factory, random = GrammarFactory(path), np.random.default_rng(9)
    stem = random.integers(5, VOCAB_SIZE, 48).tolist()
    samplings = [
        SamplingSpec(**{"max_tokens": 30, "seed": uid, **PARAMETERS[uid % len(PARAMETERS)]})
        for uid in range(2 * len(PARAMETERS))
    ]
    patterns = dict(enumerate(PATTERNS, len(samplings)))
    samplings += [SamplingSpec(max_tokens=60, seed=uid, temperature=0.8, logprobs=1) for uid in patterns]
    requests = []
    for uid, sampling in enumerate(samplings):
        own = random.integers(5, VOCAB_SIZE, int(random.integers(1, 40))).tolist()
        grammar = factory.regex(patterns[uid]) if uid in patterns else None
        requests.append(request(uid, stem + own if uid % 3 == 0 else own, sampling, grammar))
    return Crowd(path, requests, patterns, factory)


def test_crowd_under_memory_pressure_gets_the_same_replies_as_from_one_rank(
    two_ranks: RankPool, crowd: Crowd
) -> None:
    """Both ranks plan the same steps and have the same bits, log-probabilities included."""
    [first], [second] = two_ranks.run(serve_on_rank, crowd.path, crowd.requests, [PRESSURE])
    assert first == second
    [alone] = serve_on_rank(single_rank(), crowd.path, crowd.requests, [PRESSURE])
    assert first.steps == alone.steps and first.checksum == alone.checksum
    assert first.preempted == alone.preempted > 0
    assert first.hit_tokens == alone.hit_tokens > 0
    assert first.lost_pages == alone.lost_pages == 0
    assert_same_replies(first.replies, alone.replies)
    for uid in ABORTED:
        assert first.replies[uid].finish == FinishReason.ABORT
    for uid, pattern in crowd.patterns.items():
        assert first.replies[uid].finish == FinishReason.STOP
        written = crowd.factory.written(first.replies[uid].tokens[:-1])
        assert re.fullmatch(pattern.encode(), written)


def assert_same_replies(found: Replies, expected: Replies) -> None:
    """Compare tokens, ends and, up to rounding errors, log-probabilities."""
    assert found.keys() == expected.keys()
    for uid, reply in found.items():
        other = expected[uid]
        assert (reply.tokens, reply.finish, reply.failed) == (other.tokens, other.finish, other.failed), uid
        for one, two in zip(
            [*reply.logprobs, *reply.prompt_logprobs],
            [*other.logprobs, *other.prompt_logprobs],
            strict=True,
        ):
            assert one[0] == two[0] and one[2] == two[2], uid
            np.testing.assert_allclose([one[1], *one[3]], [two[1], *two[3]], atol=LOGPROB_ERROR)


KINDS: Final[list[dict[str, Any]]] = [
    {},
    {"page_size": 1, "disable_cuda_graph": True},
    {"page_size": 64, "disable_overlap_schedule": True},
]
"""Each alternative value once: the replies of all must be equal, so no two need a run of their own."""


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=FULL)])
def test_identical_steps_give_identical_tokens(two_ranks: RankPool, tmp_path: Path, dtype: str) -> None:
    """With and without overlap scheduling, with and without CUDA graphs, over pages of any size.

    Only steps of the same rows have the same last bits, so no two requests share a prefix, and all run at a time.
    """
    path = make_wide_model(tmp_path, "llama")
    samplings = [
        SamplingSpec(max_tokens=COUNT, seed=uid, temperature=0.7 * (uid % 2), ignore_eos=True)
        for uid in range(8)
    ]
    lengths = tuple(int(each) for each in np.random.default_rng(8).integers(1, 90, len(samplings)))
    requests = [
        request(uid, [uid + 2, *prompt], samplings[uid])
        for uid, prompt in enumerate(random_prompts(8, lengths))
    ]
    runs = [{"dtype": dtype, "max_num_batched_tokens": 64, **changes} for changes in KINDS]
    served, others = two_ranks.run(serve_on_rank, path, requests, runs)
    assert served == others
    assert all(len(served[0].replies[each.uid].tokens) == COUNT for each in requests)
    for changes, each in zip(KINDS[1:], served[1:], strict=True):
        assert each.steps == served[0].steps, changes
        assert each.replies == served[0].replies, changes


FP8: Final[list[dict[str, Any]]] = [
    {"quantization": "fp8"},
    {"kv_cache_dtype": "fp8_e4m3"},
    {"quantization": "fp8", "kv_cache_dtype": "fp8_e4m3"},
]


def test_fp8_is_as_accurate_on_two_ranks_as_on_one(two_ranks: RankPool, tmp_path: Path) -> None:
    """Activations of a sharded product have a scale on each rank, so tokens may differ; errors must not grow.

    The error is that of the log-probabilities of prompts, against transformers in float32 without quantization.
    """
    path = make_wide_model(tmp_path, "llama")
    prompts = random_prompts(5, (90, 33, 70, 120))
    sampling = SamplingSpec(max_tokens=2, seed=0, temperature=0.0, prompt_logprobs=0, ignore_eos=True)
    requests = [request(uid, prompt, sampling) for uid, prompt in enumerate(prompts)]
    runs = [{"dtype": "bfloat16", "max_num_batched_tokens": 48, **changes} for changes in [{}, *FP8]]
    served, others = two_ranks.run(serve_on_rank, path, requests, runs)
    assert served == others
    alone = serve_on_rank(single_rank(), path, requests, runs)
    exact = oracle_logits(
        load_reference(path), [prompt[:1] for prompt in prompts], [prompt[1:] for prompt in prompts]
    )
    errors = [[prompt_error(each, prompts, exact) for each in outcomes] for outcomes in (served, alone)]
    print(f"\nerrors in nats, unquantized and FP8: two ranks {errors[0]}, one rank {errors[1]}")
    for two, one in zip(*errors, strict=True):
        assert two <= 1.5 * one
    assert min(errors[1][1:]) > errors[1][0], "nothing was quantized"


def prompt_error(served: Served, prompts: list[list[int]], exact: list[torch.Tensor]) -> float:
    """Return the root mean square error of the prompts' log-probabilities, in nats."""
    off: list[float] = []
    for uid, (prompt, logits) in enumerate(zip(prompts, exact, strict=True)):
        known = logits.double().log_softmax(-1).gather(1, torch.tensor(prompt[1:])[:, None]).squeeze(1)
        found = [value for _, value, *_ in served.replies[uid].prompt_logprobs[1:]]
        off += (np.array(found) - known.numpy()).tolist()
    return float(np.square(off).mean() ** 0.5)
