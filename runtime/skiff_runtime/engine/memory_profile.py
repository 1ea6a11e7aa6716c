"""How much GPU memory the steps take besides weights and KV cache: found by running the largest ones."""

import gc
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch

from skiff_runtime import log
from skiff_runtime.config import Config
from skiff_runtime.engine.decode_graph import DecodeGraphRunner
from skiff_runtime.engine.free_memory import free_bytes
from skiff_runtime.engine.input_batch import SlotTables
from skiff_runtime.engine.model_runner import ModelRunner
from skiff_runtime.engine.prefill_graph import PrefillGraphRunner
from skiff_runtime.engine.sampler import Sampler
from skiff_runtime.models.config import ModelConfig
from skiff_runtime.models.footprint import estimate_sampling_bytes
from skiff_runtime.step import StepPlan

MIB = 1 << 20
SLACK = 0.1
"""Share of the activations that fragments of the allocator may cost."""
NODE_BYTES = 16 << 20
"""What the driver takes for a layer's part of a graph, at most. If more is gone, another process has taken it."""
EXTRA_NODES = 8
"""Layers' worth of what is not in a layer, such as the choice of tokens."""


@torch.inference_mode()
def reserve(
    config: Config, model: ModelConfig, runner: ModelRunner, tables: SlotTables, sampler: Sampler
) -> int:
    """Bytes that steps and graphs of this configuration will take. The rows are nobody's, and leave no trace."""
    stream = torch.cuda.Stream(runner.device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        activations = _activations(config, runner, tables)
        most = NODE_BYTES * (model.num_layers + EXTRA_NODES)
        graphs = 0
        if runner.backend.supports_cuda_graphs:
            graphs += _graphs(
                lambda: DecodeGraphRunner(runner, tables, sampler, rows=config.running_limit), config, most
            )
            graphs += _graphs(
                lambda: PrefillGraphRunner(runner, tokens=config.max_num_batched_tokens), config, most
            )
    choice = estimate_sampling_bytes(config, model)
    _settle()
    log.event(
        "memory_profiled",
        activations_mib=activations // MIB,
        graphs_mib=graphs // MIB,
        sampling_mib=choice // MIB,
    )
    return int(activations * (1 + SLACK)) + graphs + choice


def _activations(config: Config, runner: ModelRunner, tables: SlotTables) -> int:
    """Peak of a step of ``max_num_batched_tokens`` tokens, and of the logits of as many rows as may run."""
    _settle()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    plan = _largest(config, tables)
    batch = tables.inputs(plan)
    hidden = runner.forward(batch.tokens, batch.attention)
    last = torch.zeros(config.running_limit, dtype=torch.int64, device=runner.device)
    logits = runner.logits(hidden.at(last))
    torch.cuda.synchronize()
    del logits, hidden, batch
    return torch.cuda.max_memory_allocated() - before


def _largest(config: Config, tables: SlotTables) -> StepPlan:
    """Chunks of prompts that fill a step."""
    longest = tables.tokens.shape[1] - 1
    full, rest = divmod(config.max_num_batched_tokens, longest)
    lengths = np.array([longest] * full + [rest] * (rest > 0), dtype=np.int32)[: config.running_limit]
    rows, nothing = len(lengths), np.empty(0, np.int32)
    return StepPlan(
        number=0,
        slots=np.full(rows, tables.nobody, np.int32),
        starts=np.zeros(rows, np.int32),
        lengths=lengths,
        samples=np.ones(rows, np.bool_),
        decode_rows=0,
        opened=(),
        page_slots=nothing,
        page_columns=nothing,
        page_ids=nothing,
    )


def _graphs(make: Callable[[], DecodeGraphRunner | PrefillGraphRunner], config: Config, most: int) -> int:
    """Of steps of one kind, with what these hold beside them.

    From what the two largest take: the others lie in the memory of the largest, but for their nodes and what they return
    beside logits. Nodes are the driver's, at most ``most`` bytes of one size, which can only be told from what is free on the GPU.
    """
    seen = [_memory()]
    step = make()
    captures = step.captures()
    for capture in captures[:2]:
        if not config.disable_cuda_graph:
            capture()
        seen.append(_memory())
    taken = []
    for (free, reserved), (free_after, reserved_after) in pairwise(seen):
        ours = reserved_after - reserved
        taken.append(ours + min(max(0, free - free_after - ours), most))
    return taken[0] + sum(taken[1:]) * (len(captures) - 1)


def _memory() -> tuple[int, int]:
    """(Free bytes of the GPU, bytes of it that torch's allocator holds), when it keeps nothing back."""
    _settle()
    return free_bytes(torch.device("cuda", torch.cuda.current_device())), torch.cuda.memory_reserved()


def _settle() -> None:
    """Give all cached memory back, so that what is free can be read."""
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
