"""All that a request can ask for, in bfloat16 on a GPU: every token against transformers' logits, but for ties.

A tie is a matter of logits. So a request's edits, its temperature and its noise, which are known to the last bit, are
applied to the oracle's logits in float64; the token that was taken must then have the best score there is, but for what
the logits of two tokens may be off.
"""

import re
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from bf16_engine import error_of, known_logits, make_wide_model, serve, tie_of
from grammar_factory import GrammarFactory
from reference_logits_processors import edited_row
from scheduler_bench import UNKNOWN, Thought, request
from tiny_tokenizer import EOS_ID, VOCAB_SIZE

from skiff_runtime.kernels.gumbel import add_gumbel
from skiff_runtime.messages import FinishReason, SamplingSpec
from skiff_runtime.scheduler import admission

pytestmark = pytest.mark.gpu

COUNT: Final = 40
ASKED: Final[list[dict[str, Any]]] = [
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
"""Each one's seed is its number, if it names none."""
PATTERNS: Final = ("[a-f]{9,20}", "(yes|no|perhaps){2,5}", '\\{"n": [0-9]{1,9}\\}')
ABORTED: Final = (1, 6)
"""They may hear no more than has been computed by then."""


@pytest.mark.parametrize("attention", ["flashinfer,triton", "triton"])
@pytest.mark.parametrize("crowded", [False, True])
def test_every_answer_is_what_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attention: str, crowded: bool
) -> None:
    """Crowded: few pages, so that requests are preempted, and two that are cancelled."""
    monkeypatch.setattr(
        admission, "INITIAL_NEW_TOKEN_RATIO", 0.1
    )  # of what may still be wanted: it lets too many in
    path = make_wide_model(tmp_path, "llama", seed=37)
    maker, rng = GrammarFactory(path), np.random.default_rng(9)
    samplings = [SamplingSpec(**{"max_tokens": COUNT, "seed": at, **asked}) for at, asked in enumerate(ASKED)]
    free = len(samplings)
    samplings += [
        SamplingSpec(max_tokens=60, seed=at, temperature=at * 0.8, top_p=0.9, logprobs=at)
        for at in range(len(PATTERNS))
    ]
    prompts = [rng.integers(5, VOCAB_SIZE, int(rng.integers(1, 70))).tolist() for _ in samplings]
    grammars = [*[None] * free, *map(maker.regex, PATTERNS)]
    asked = [request(uid, *each) for uid, each in enumerate(zip(prompts, samplings, grammars, strict=True))]
    few: dict[str, Any] = {"max_total_tokens": 192, "max_num_batched_tokens": 48, "aborted": ABORTED}
    served = serve(
        path, asked, attention_backend=attention, **(few if crowded else {"max_num_batched_tokens": 256})
    )
    assert served.lost_pages == 0 and (served.preempted > 0) is crowded
    replies = [served.replies[uid] for uid in range(len(asked))]
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
        told_of = sampling.logprobs is not None
        assert_told(reply.thoughts, reply.tokens if told_of else [], rows, sampling.logprobs or 0, error)
        if sampling.prompt_logprobs is not None:
            assert reply.prompt[0] == (prompt[0], *UNKNOWN)
            assert_told(reply.prompt[1:], prompt[1:], read[uid], sampling.prompt_logprobs, error)
    assert different <= free * COUNT // 10


def assert_chosen(
    rows: torch.Tensor, prompt: list[int], output: list[int], sampling: SamplingSpec, share: float
) -> list[bool]:
    """Each token of the output has the best score, by the oracle's logits float64 [N, vocab]; where it is another's.

    Two are a tie if they differ by that ``share`` of the largest logit.
    """
    missed = []
    for at, (row, token) in enumerate(zip(rows, output, strict=True)):
        tie = (
            share * float(row.abs().max()) * max(sampling.repetition_penalty, 1 / sampling.repetition_penalty)
        )
        scores = edited_row(row, prompt, output[:at], sampling, ends=[EOS_ID], banned=-torch.inf)
        assert scores[token] > -torch.inf
        if sampling.temperature > 0:
            scores, tie = scores / sampling.temperature, tie / sampling.temperature
            floor = scores.max() + np.log(sampling.min_p) if sampling.min_p else scores.min()
            floor = max(floor, scores.topk(sampling.top_k).values[-1]) if sampling.top_k else floor
            assert scores[token] >= floor - tie
            place = torch.tensor([signed(sampling.seed)]), torch.tensor([len(prompt) + at])
            noise = add_gumbel(torch.zeros(1, VOCAB_SIZE), *place)[0].double()
            scores = (
                (scores + noise)
                .masked_fill(scores < floor + tie, -torch.inf)
                .index_put_((torch.tensor([token]),), scores[token] + noise[token])
            )
        assert scores[token] >= scores.max() - tie, (at, sampling)
        missed.append(int(scores.argmax()) != token)
    return missed


def signed(seed: int) -> int:
    """As 64 bits with a sign."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)


def assert_told(
    thoughts: list[Thought], tokens: list[int], rows: torch.Tensor, top: int, error: float
) -> None:
    """Log-probabilities are the oracle's: of the tokens, and of the likeliest.

    Each has the ``error`` of a logit in either engine: the root of the mean of all squares is about 1.4 times that, here at most
    twice; and of so many one may be off by half more than what makes a tie.
    """
    assert [token for token, *_ in thoughts] == tokens
    off = [np.zeros(1)]
    for row, (token, value, ids, values) in zip(rows, thoughts, strict=False):
        assert len(ids) == len(set(ids)) == top and values == sorted(values, reverse=True)
        known = row.log_softmax(-1)
        wanted = torch.cat((known[[token, *ids]], known.topk(top).values))
        off.append((np.array([value, *values, *values]) - wanted.numpy()) / float(row.abs().max()))
    errors = np.concatenate(off)
    assert np.abs(errors).max() < 1.5 * tie_of(error) and np.square(errors).mean() ** 0.5 < 2 * error
