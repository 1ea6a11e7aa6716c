"""Memory profile: the GPU memory that steps take besides weights and KV cache, measured by running the largest ones."""

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
FRAGMENTATION = 0.1
"""Share of the activations that fragmentation of the allocator may cost."""
NODE_BYTES = 16 << 20
"""Bound of the driver's memory for one layer's part of a graph. If more is gone, another process has taken it."""
EXTRA_NODES = 8
"""Bound of the driver's memory for parts of a graph outside of the layers, such as sampling, in layers."""


@torch.inference_mode()
def profile_memory(
    config: Config, model: ModelConfig, runner: ModelRunner, tables: SlotTables, sampler: Sampler
) -> int:
    """Return the bytes that steps and graphs of this configuration will take; the rows are padding and leave no trace."""
    stream = torch.cuda.Stream(runner.device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        activations = _measure_activations(config, runner, tables)
        max_driver_bytes = NODE_BYTES * (model.num_layers + EXTRA_NODES)
        graphs = 0
        if runner.backend.supports_cuda_graphs:
            graphs += _measure_graphs(
                lambda: DecodeGraphRunner(runner, tables, sampler, rows=config.running_limit),
                config,
                max_driver_bytes,
            )
            graphs += _measure_graphs(
                lambda: PrefillGraphRunner(runner, tokens=config.max_num_batched_tokens),
                config,
                max_driver_bytes,
            )
    sampling = estimate_sampling_bytes(config, model)
    _release_cached()
    log.event(
        "memory_profiled",
        activations_mib=activations // MIB,
        graphs_mib=graphs // MIB,
        sampling_mib=sampling // MIB,
    )
    return int(activations * (1 + FRAGMENTATION)) + graphs + sampling


def _measure_activations(config: Config, runner: ModelRunner, tables: SlotTables) -> int:
    """Measure the peak of a step of ``max_num_batched_tokens`` tokens, with the whole logits of all rows that may run.

    With tensor parallelism this also sets up the connections over which rows are gathered and exchanged.
    """
    _release_cached()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    plan = _largest_plan(config, tables)
    batch = tables.make_batch(plan)
    hidden = runner.forward(batch.inputs, batch.attention)
    first = torch.zeros(config.running_limit, dtype=torch.int64, device=runner.device)
    logits, tp_size = runner.logits(hidden.select(first)), config.tp_size
    whole = runner.vocab_shard.gather(logits)
    if tp_size > 1:
        runner.vocab_shard.exchange_rows(logits[:1].repeat(tp_size, 1))
    torch.cuda.synchronize()
    del logits, whole, hidden, batch
    return torch.cuda.max_memory_allocated() - before


def _largest_plan(config: Config, tables: SlotTables) -> StepPlan:
    """Plan a step filled by prefill rows of the padding slot."""
    max_model_len = tables.tokens.shape[1] - 1
    full, rest = divmod(config.max_num_batched_tokens, max_model_len)
    lengths = np.array([max_model_len] * full + [rest] * (rest > 0), dtype=np.int32)[: config.running_limit]
    rows, nothing = len(lengths), np.empty(0, np.int32)
    return StepPlan(
        number=0,
        slots=np.full(rows, tables.padding_slot, np.int32),
        starts=np.zeros(rows, np.int32),
        lengths=lengths,
        samples=np.ones(rows, np.bool_),
        decode_rows=0,
        opened=(),
        page_slots=nothing,
        page_columns=nothing,
        page_ids=nothing,
    )


def _measure_graphs(
    make_runner: Callable[[], DecodeGraphRunner | PrefillGraphRunner], config: Config, max_driver_bytes: int
) -> int:
    """Estimate the memory of one kind of graphs and of their runner, from its two largest graphs.

    All other graphs use the memory of the largest one, except for their nodes and the results that they return besides
    logits: each is counted like the second. Nodes lie in the driver's memory, which shows only in the GPU's free
    memory, where other processes allocate, too; so at most ``max_driver_bytes`` are counted per graph.
    """
    seen = [_read_memory()]
    runner = make_runner()
    tasks = runner.capture_tasks()
    for capture in tasks[:2]:
        if not config.disable_cuda_graph:
            capture()
        seen.append(_read_memory())
    taken = []
    for (free, reserved), (free_after, reserved_after) in pairwise(seen):
        ours = reserved_after - reserved
        taken.append(ours + min(max(0, free - free_after - ours), max_driver_bytes))
    return taken[0] + sum(taken[1:]) * (len(tasks) - 1)


def _read_memory() -> tuple[int, int]:
    """Return (free bytes of the GPU, bytes that torch's allocator holds), after it has released its cache."""
    _release_cached()
    return free_bytes(torch.device("cuda", torch.cuda.current_device())), torch.cuda.memory_reserved()


def _release_cached() -> None:
    """Return all cached memory to the driver, so that free memory can be read."""
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
