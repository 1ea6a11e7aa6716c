"""Functions that tests run on every rank; importable by the processes that ``rank_processes`` spawns."""

from pathlib import Path
from typing import Any

import torch
from engine_driver import generate, make_engine
from engine_soak import Outcome, soak

from skiff_runtime.distributed.tensor_parallel import TensorParallelGroup
from skiff_runtime.messages import SamplingSpec


def collectives(group: TensorParallelGroup) -> dict[str, Any]:
    """Run every collective once, with different values on each rank."""
    mine = float(group.tp_rank + 1)
    with group.device:
        own = torch.tensor([[mine, 0.0], [mine * 10, 1.0]])
        return {
            "sum": group.all_reduce(torch.full((2,), mine)).tolist(),
            "short": group.all_reduce(torch.full((2,), mine, dtype=torch.bfloat16)).tolist(),
            "dtype": str(group.all_reduce(torch.ones(1, dtype=torch.bfloat16)).dtype),
            "gathered": group.all_gather(own).tolist(),
            "placed": group.all_gather(own, torch.zeros(2, 4)).tolist(),
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
