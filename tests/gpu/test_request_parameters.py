"""All parameters of a request, in bfloat16 on a GPU: every token is checked against transformers' logits.

A request's logits processors, temperature and noise, which are known exactly, are applied to transformers' logits in
float64. The sampled token must then have the best score, up to the error of two tokens' logits (a near tie).
"""

import re
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from bf16_engine import SETTINGS, error_of, known_logits, make_wide_model, serve, tie_of
from gpus import needs_gpus
from grammar_factory import GrammarFactory
from rank_processes import on_ranks
from reference_logits_processors import process_row
from scheduler_bench import UNPREDICTED, ReceivedLogprobs, request
from serving_engine import serve_on_rank
from tiny_tokenizer import EOS_ID, VOCAB_SIZE

from skiff_runtime.kernels.gumbel import add_gumbel
from skiff_runtime.messages import FinishReason, SamplingSpec

pytestmark = pytest.mark.gpu

COUNT: Final = 40
PARAMETERS: Final[list[dict[str, Any]]] = [
    {"temperature": 0.0},
    {},
    {"seed": 1 << 63, "temperature": 0.6, "logprobs": 0},
    {"temperature": 1.5, "min_p": 0.05},
    {"temperature": 1.2, "top_k": 12, "seed": -7},
    {"temperature": 0.0, "repetition_penalty": 1.8, "logprobs": 3},
    {"temperature": 0.0, "presence_penalty": 2.0},
    {"temperature": 0.3, "frequency_penalty": 1.2},
    {
        "temperature": 1.0,
        "repetition_penalty": 0.8,
        "logit_bias": ((40, 5.0), (77, -3.0)),
        "prompt_logprobs": 2,
    },
    {"temperature": 0.0, "logit_bias": ((EOS_ID, 100.0),), "min_tokens": 7},
    {"temperature": 0.0, "logprobs": 5, "prompt_logprobs": 0},
]
"""A request's seed is its index, unless it has one."""
PATTERNS: Final = ("[a-f]{9,20}", "(yes|no|perhaps){2,5}", '\\{"n": [0-9]{1,9}\\}')
ABORTED: Final = (1, 6)
"""Requests that are aborted after their first token."""


@pytest.mark.parametrize("attention", ["flashinfer,triton", "triton"])
@pytest.mark.parametrize("crowded", [False, True])
@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=needs_gpus(2))], ids=lambda tp: f"tp{tp}")
def test_answers_respect_all_sampling_parameters(
    tmp_path: Path, attention: str, crowded: bool, tp: int
) -> None:
    """In the crowded case there are few pages, so that requests are preempted, and two requests are aborted."""
    path = make_wide_model(tmp_path / "model", "llama", seed=37)
    maker, rng = GrammarFactory(path), np.random.default_rng(9)
    samplings = [
        SamplingSpec(**{"max_tokens": COUNT, "seed": at, **requests})
        for at, requests in enumerate(PARAMETERS)
    ]
    free = len(samplings)
    samplings += [
        SamplingSpec(max_tokens=60, seed=at, temperature=at * 0.8, top_p=0.9, logprobs=at)
        for at in range(len(PATTERNS))
    ]
    prompts = [rng.integers(5, VOCAB_SIZE, int(rng.integers(1, 70))).tolist() for _ in samplings]
    grammars = [*[None] * free, *map(maker.regex, PATTERNS)]
    requests = [
        request(uid, *each) for uid, each in enumerate(zip(prompts, samplings, grammars, strict=True))
    ]
    few: dict[str, Any] = {"max_total_tokens": 192, "max_num_batched_tokens": 48, "aborted": ABORTED}
    options = {**SETTINGS, "attention_backend": attention, "new_token_ratio": 0.1}
    options |= few if crowded else {"max_num_batched_tokens": 256}
    if tp == 1:
        served = serve(path, requests, **options)
    else:
        [served], [other] = on_ranks(tp, tmp_path, serve_on_rank, path, requests, [options])
        assert served == other
    assert served.lost_pages == 0 and (served.preempted > 0) is crowded
    replies = [served.replies[uid] for uid in range(len(requests))]
    for uid in ABORTED if crowded else ():
        assert replies[uid].finish == FinishReason.ABORT and 0 < len(replies[uid].tokens) < COUNT
    for reply, pattern in zip(replies[free:], PATTERNS, strict=True):
        assert reply.finish == FinishReason.STOP and reply.tokens[-1] == EOS_ID
        assert re.fullmatch(pattern.encode(), maker.written(reply.tokens[:-1]))
    outputs = [reply.tokens for reply in replies]
    logits = known_logits(path, torch.bfloat16, prompts, outputs)
    exact = known_logits(path, torch.float32, prompts, outputs)
    error = error_of(torch.cat(logits), torch.cat(exact))
    read = known_logits(
        path, torch.bfloat16, [prompt[:1] for prompt in prompts], [prompt[1:] for prompt in prompts]
    )
    different = 0
    for uid, (prompt, sampling, reply) in enumerate(zip(prompts, samplings, replies, strict=True)):
        rows = logits[uid]
        if uid < free:
            different += sum(assert_chosen(rows, prompt, reply.tokens, sampling, tie_of(error)))
        has_logprobs = sampling.logprobs is not None
        assert_logprobs(
            reply.logprobs, reply.tokens if has_logprobs else [], rows, sampling.logprobs or 0, error
        )
        if sampling.prompt_logprobs is not None:
            assert reply.prompt_logprobs[0] == (prompt[0], *UNPREDICTED)
            assert_logprobs(reply.prompt_logprobs[1:], prompt[1:], read[uid], sampling.prompt_logprobs, error)
    assert different <= free * COUNT // 10


def assert_chosen(
    rows: torch.Tensor, prompt: list[int], output: list[int], sampling: SamplingSpec, share: float
) -> list[bool]:
    """Check that each token of the output has the best score by transformers' logits float64 [N, vocab], or nearly so.

    Scores tie if they differ by at most ``share`` of the largest logit. Returns where another token has the best score.
    """
    missed = []
    for at, (row, token) in enumerate(zip(rows, output, strict=True)):
        tie = (
            share * float(row.abs().max()) * max(sampling.repetition_penalty, 1 / sampling.repetition_penalty)
        )
        scores = process_row(row, prompt, output[:at], sampling, end_tokens=[EOS_ID], masked=-torch.inf)
        assert scores[token] > -torch.inf
        if sampling.temperature > 0:
            scores, tie = scores / sampling.temperature, tie / sampling.temperature
            floor = scores.max() + np.log(sampling.min_p) if sampling.min_p else scores.min()
            floor = max(floor, scores.topk(sampling.top_k).values[-1]) if sampling.top_k else floor
            assert scores[token] >= floor - tie
            draw = torch.tensor([signed(sampling.seed)]), torch.tensor([len(prompt) + at])
            noise = add_gumbel(torch.zeros(1, VOCAB_SIZE), *draw)[0].double()
            scores = (
                (scores + noise)
                .masked_fill(scores < floor + tie, -torch.inf)
                .index_put_((torch.tensor([token]),), scores[token] + noise[token])
            )
        assert scores[token] >= scores.max() - tie, (at, sampling)
        missed.append(int(scores.argmax()) != token)
    return missed


def signed(seed: int) -> int:
    """Return the seed as a signed 64-bit integer."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)


def assert_logprobs(
    found: list[ReceivedLogprobs], tokens: list[int], rows: torch.Tensor, top: int, error: float
) -> None:
    """Compare the log-probabilities of tokens and of the most likely ones with transformers'.

    Both engines have the ``error`` of a logit, so the root mean square of the difference is about 1.4 times that, and
    2 times is the bound. A single one of these many may be off by half more than a tie.
    """
    assert [token for token, *_ in found] == tokens
    off = [np.zeros(1)]
    for row, (token, value, ids, values) in zip(rows, found, strict=False):
        assert len(ids) == len(set(ids)) == top and values == sorted(values, reverse=True)
        known = row.log_softmax(-1)
        expected = torch.cat((known[[token, *ids]], known.topk(top).values))
        off.append((np.array([value, *values, *values]) - expected.numpy()) / float(row.abs().max()))
    errors = np.concatenate(off)
    assert np.abs(errors).max() < 1.5 * tie_of(error) and np.square(errors).mean() ** 0.5 < 2 * error
