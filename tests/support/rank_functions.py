"""Functions that tests run on every rank; importable by the processes that ``rank_processes`` spawns."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch
from engine_driver import Driver, generate, make_engine
from engine_soak import Outcome, soak
from grammar_factory import GrammarFactory
from sampling_cases import make_case, sample_case

from skiff_runtime.distributed.tensor_parallel import TensorParallelGroup
from skiff_runtime.distributed.vocab_shard import VocabShard
from skiff_runtime.kernels.tuning import AllReduceLimits, overridden, tuning_for
from skiff_runtime.messages import SamplingSpec
from skiff_runtime.step import LogprobsOutput

REQUESTED: Final[list[dict[str, Any]]] = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.6, "seed": 1 << 63},
    {"temperature": 1e-5},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.1, "temperature": 1.4},
    {"top_k": 30, "top_p": 0.9, "min_p": 0.01, "seed": -7},
    {"temperature": 0.0, "logprobs": 3},
    {"logprobs": 20, "top_p": 0.7, "prompt_logprobs": 4},
    {"temperature": 0.0, "repetition_penalty": 1.8, "presence_penalty": 0.5},
    {"frequency_penalty": 1.2, "logit_bias": ((40, 5.0), (77, -3.0), (300, 4.0)), "min_tokens": 7},
]
"""Parameters of the rows of ``sampled_with_every_parameter``; a row's seed is its index, unless it has one."""
PATTERNS: Final = ("[a-f]{30}", "(yes|no|perhaps){9}", "[0-9]{30}")
"""Grammars of further rows, which are greedy, drawn, and drawn with top_p."""


def collectives(group: TensorParallelGroup) -> dict[str, Any]:
    """Run every collective once, with different values on each rank."""
    mine = float(group.tp_rank + 1)
    with group.device:
        own = torch.tensor([[mine, 0.0], [mine * 10, 1.0]])
        numbers = torch.tensor([group.tp_rank, -group.tp_rank, -(1 << 63)])
        return {
            "sum": group.all_reduce(torch.full((2,), mine)).tolist(),
            "short": group.all_reduce(torch.full((2,), mine, dtype=torch.bfloat16)).tolist(),
            "dtype": str(group.all_reduce(torch.ones(1, dtype=torch.bfloat16)).dtype),
            "gathered": group.all_gather(own).tolist(),
            "exchanged": group.all_to_all(own).tolist(),
            "maximum": group.all_reduce_max(numbers).tolist(),
            "minimum": group.all_reduce_min(10 - group.tp_rank),
        }


def generated_greedy(
    group: TensorParallelGroup,
    path: Path,
    prompts: list[list[int]],
    count: int,
    settings: list[dict[str, Any]],
) -> list[list[list[int]]]:
    """Generate greedy tokens by engines with each of ``settings``, fields of ``Config``."""
    outputs = []
    for changes in settings:
        engine = make_engine(path, group, page_size=16, **changes)
        try:
            outputs.append(generate(engine, prompts, count, page_size=16, budget=48, slots=6))
        finally:
            engine.close()
    return outputs


def generated_by_exchanges(
    group: TensorParallelGroup, path: Path, prompts: list[list[int]], count: int
) -> list[dict[str, Any]]:
    """Generate greedy tokens with and without graphs, where copy engines exchange the parts of more than four tokens."""
    peers = group._peers
    assert peers is not None, "the GPUs have no peer access"
    limits, size = peers._limits, 1 << 10
    peers._limits = (
        AllReduceLimits(
            ranks=2,
            low_latency=size,
            fused_low_latency=size,
            one_shot=size,
            fused_one_shot=size,
            two_shot=size,
        ),
    )
    found = []
    try:
        for disabled in (False, True):
            with patch.object(peers, "start_exchange", wraps=peers.start_exchange) as start:
                engine = make_engine(path, group, page_size=16, tp_size=2, disable_cuda_graph=disabled)
                try:
                    engine.warmup(defer_captures=False)
                    tokens = generate(engine, prompts, count, page_size=16, budget=48, slots=6)
                finally:
                    engine.close()
            found.append({"tokens": tokens, "exchanges": start.call_count > 0})
    finally:
        peers._limits = limits
    return found


def generated(
    group: TensorParallelGroup, path: Path, prompts: list[list[int]], count: int, dtype: str = "float32"
) -> list[list[list[int]]]:
    """Generate greedy tokens, then sampled ones."""
    samplings = [
        SamplingSpec(
            max_tokens=count,
            seed=number,
            temperature=1.0,
            top_k=number % 3 * 8,
            repetition_penalty=1.0 + number % 2,
            logit_bias=((10 * number, 3.0),),
            min_tokens=number % 4,
            logprobs=number,
            prompt_logprobs=2,
        )
        for number in range(len(prompts))
    ]
    engine = make_engine(path, group, page_size=16, tp_size=group.tp_size, dtype=dtype)
    try:
        engine.warmup()
        return [
            generate(engine, prompts, count, page_size=16, budget=48, slots=6, samplings=chosen)
            for chosen in (None, samplings)
        ]
    finally:
        engine.close()


def soaked(group: TensorParallelGroup, path: Path, count: int, options: dict[str, Any]) -> Outcome:
    """Serve ``count`` requests as ``engine_soak.soak`` does, in lockstep with the other ranks."""
    return soak(path, count, group=group, **options)


def compare_sampling(group: TensorParallelGroup, batches: int) -> dict[str, int]:
    """Sample random batches from this rank's shard, and alone; count the rows, and those whose tokens are different."""
    tuning, rows, different = tuning_for(group.device), 0, 0
    for seed in range(batches):
        case = make_case(seed, 1 + seed % 40, (5, 101, 1000, 40)[seed % 4])
        shard = VocabShard(group, case.logits.shape[1])
        with overridden(replace(tuning, row_exchange_min_rows=(1, 1000)[seed % 2])):
            found = sample_case(case, group.device, shard)
        expected = sample_case(case, group.device)
        rows += len(expected)
        different += sum(token != wanted for token, wanted in zip(found, expected, strict=True))
    return {"rows": rows, "different": different}


def sampled_with_every_parameter(
    group: TensorParallelGroup, path: Path, steps: int, exchange_min_rows: int, settings: dict[str, Any]
) -> dict[str, Any]:
    """Sample rows with all parameters and grammars together; return tokens, and log-probabilities as nested lists.

    ``exchange_min_rows`` is the number of filtered rows from which they are divided among the ranks; ``settings`` are
    fields of the engine's configuration.
    """
    maker = GrammarFactory(path)
    samplings = [SamplingSpec(**{"max_tokens": 99, "seed": at, **each}) for at, each in enumerate(REQUESTED)]
    guided = [
        SamplingSpec(max_tokens=99, seed=at, temperature=at * 0.8, top_p=1 - at * 0.1) for at in range(3)
    ]
    grammars = [*[None] * len(samplings), *map(maker.regex, PATTERNS)]
    samplings += guided
    count = len(samplings)
    with overridden(replace(tuning_for(group.device), row_exchange_min_rows=exchange_min_rows)):
        engine = make_engine(
            path, group, page_size=16, max_running_requests=count, tp_size=group.tp_size, **settings
        )
        try:
            engine.warmup()
            driver = Driver(engine, 16)
            rows = [
                driver.open(
                    slot, [7 + 3 * slot, 20, 33 + slot, 5 + slot], samplings[slot], grammar=grammars[slot]
                )
                for slot in range(count)
            ]
            results = [driver.step([(row, row.known) for row in rows])]
            results += [driver.step([(row, 1) for row in rows], decode_rows=count) for _ in range(steps)]
        finally:
            engine.close()
    return {
        "tokens": [row.output for row in rows],
        "logprob_rows": [result.logprob_rows.tolist() for result in results],
        "logprobs": [_listed(result.logprobs) for result in results if result.logprobs is not None],
        "prompts": [
            [chunk.slot, chunk.start, _listed(chunk.logprobs)]
            for result in results
            for chunk in result.prompt_logprobs
        ],
    }


def _listed(logprobs: LogprobsOutput) -> list[Any]:
    return [logprobs.top_ids.tolist(), logprobs.token_logprobs.tolist(), logprobs.top_logprobs.tolist()]
