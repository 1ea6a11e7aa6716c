"""Memory profile: the GPU memory that steps take besides weights and KV cache, measured by running the largest ones.

A profile that an earlier start kept is used again if the largest step, which every start runs, takes what it took then.
Thus what a step needs is always measured; the memory of graphs alone, whose captures take time, is taken from the cache.
"""

import gc
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch

from skiff_runtime import log
from skiff_runtime.config import Config
from skiff_runtime.engine.decode_graph import DecodeGraphRunner
from skiff_runtime.engine.free_memory import free_bytes
from skiff_runtime.engine.graph_memory import NO_GRAPH_MEMORY, GraphMemory, MemoryProfile
from skiff_runtime.engine.input_batch import SlotTables
from skiff_runtime.engine.memory_profile_cache import MemoryProfileCache
from skiff_runtime.engine.model_runner import ModelRunner
from skiff_runtime.engine.prefill_graph import PrefillGraphRunner
from skiff_runtime.engine.sampler import Sampler
from skiff_runtime.models.config import ModelConfig
from skiff_runtime.models.footprint import estimate_sampling_bytes
from skiff_runtime.step import NO_LORA_SLOT, StepPlan

MIB = 1 << 20
NODE_BYTES = 16 << 20
"""Bound of the driver's memory for one layer's part of a graph. If more is gone, another process has taken it."""
EXTRA_NODES = 8
"""Bound of the driver's memory for parts of a graph outside of the layers, such as sampling, in layers."""
MAX_DEVIATION = 0.02
"""Share by which the activations of a start may differ from those of the cached profile."""
MAX_DEVIATION_BYTES = 16 << 20
"""Bytes by which the activations may differ, for small models; the larger of the two bounds applies."""


@torch.inference_mode()
def profile_memory(
    config: Config,
    model: ModelConfig,
    runner: ModelRunner,
    tables: SlotTables,
    sampler: Sampler,
    *,
    cache: MemoryProfileCache | None,
    all_ranks: Callable[[bool], bool],
) -> MemoryProfile:
    """Return the memory that steps and graphs of this configuration will take; the rows are padding and leave no trace.

    ``all_ranks(ok)`` returns True if it is called with True on every rank: the profile contains collectives, so all ranks
    take theirs from the ``cache`` (None: there is none), or none does.
    """
    stream = torch.cuda.Stream(runner.device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        profile = find_or_measure(
            cache,
            all_ranks,
            measure_activations=lambda: _measure_activations(config, runner, tables),
            measure_graphs=lambda: _measure_all_graphs(config, model, runner, tables, sampler),
            sampling=estimate_sampling_bytes(config, model),
        )
    _release_cached()
    return profile


def find_or_measure(
    cache: MemoryProfileCache | None,
    all_ranks: Callable[[bool], bool],
    *,
    measure_activations: Callable[[], int],
    measure_graphs: Callable[[], tuple[GraphMemory, GraphMemory]],
    sampling: int,
) -> MemoryProfile:
    """Measure the activations, and take the graphs' memory from a cached profile that fits them, or measure it, too.

    ``measure_graphs`` returns the memory of decode graphs and of prefill graphs. A new profile replaces a cached one.
    """
    cached = None if cache is None else cache.load()
    activations = measure_activations()
    is_cached = all_ranks(cached is not None and fits(cached, activations, sampling))
    if is_cached:
        assert cached is not None
        graphs = cached.decode_graphs, cached.prefill_graphs
    else:
        graphs = measure_graphs()
    profile = MemoryProfile(activations, *graphs, sampling)
    if cache is not None and not is_cached:
        cache.store(profile)
    log.event(
        "memory_profiled",
        activations_mib=activations // MIB,
        graphs_mib=(profile.decode_graphs.total + profile.prefill_graphs.total) // MIB,
        sampling_mib=sampling // MIB,
        cached=is_cached,
    )
    return profile


def fits(cached: MemoryProfile, activations: int, sampling: int) -> bool:
    """Return whether a cached profile describes an engine whose largest step takes ``activations`` bytes."""
    allowed = max(MAX_DEVIATION_BYTES, int(cached.activations * MAX_DEVIATION))
    return abs(activations - cached.activations) <= allowed and sampling == cached.sampling


def _measure_all_graphs(
    config: Config, model: ModelConfig, runner: ModelRunner, tables: SlotTables, sampler: Sampler
) -> tuple[GraphMemory, GraphMemory]:
    if not runner.backend.supports_cuda_graphs:
        return NO_GRAPH_MEMORY, NO_GRAPH_MEMORY
    max_driver_bytes = NODE_BYTES * (model.num_layers + EXTRA_NODES)
    decode = _measure_graphs(
        lambda: DecodeGraphRunner(runner, tables, sampler, rows=config.running_limit),
        config,
        max_driver_bytes,
    )
    prefill = _measure_graphs(
        lambda: PrefillGraphRunner(runner, tokens=config.max_num_batched_tokens), config, max_driver_bytes
    )
    return decode, prefill


def _measure_activations(config: Config, runner: ModelRunner, tables: SlotTables) -> int:
    """Measure the peak of a step of ``max_num_batched_tokens`` tokens, with the whole logits of all rows that may run.

    With tensor parallelism this also sets up the connections over which rows are gathered and exchanged.
    """
    _release_cached()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    plan = _largest_plan(config, tables)
    batch = tables.make_batch(plan)
    lora_slots = None
    if runner.lora is not None:  # a step with adapters takes more than one without
        lora_slots = torch.full((plan.num_tokens,), NO_LORA_SLOT, dtype=torch.int32, device=runner.device)
    hidden = runner.forward(batch.inputs, batch.attention, lora_slots)
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
) -> GraphMemory:
    """Estimate the memory of one kind of graphs and of their runner, from its two largest graphs.

    All other graphs use the memory of the largest one, except for their nodes and the results that they return besides
    logits: each is counted like the second. Nodes lie in the driver's memory, which shows only in the GPU's free
    memory, where other processes allocate, too; so at most ``max_driver_bytes`` are counted per graph.
    """
    seen = [_read_memory()]
    runner = make_runner()
    seen.append(_read_memory())
    tasks = runner.capture_tasks()
    for task in tasks[:2]:
        if not config.disable_cuda_graph:
            task.capture()
        seen.append(_read_memory())
    taken = []
    for (free, reserved), (free_after, reserved_after) in pairwise(seen):
        ours = reserved_after - reserved
        taken.append(ours + min(max(0, free - free_after - ours), max_driver_bytes))
    return GraphMemory(taken[0], taken[1], sum(taken[2:]), len(tasks))


def _read_memory() -> tuple[int, int]:
    """Return (free bytes of the GPU, bytes that torch's allocator holds), after it has released its cache."""
    _release_cached()
    return free_bytes(torch.device("cuda", torch.cuda.current_device())), torch.cuda.memory_reserved()


def _release_cached() -> None:
    """Return all cached memory to the driver, so that free memory can be read."""
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
