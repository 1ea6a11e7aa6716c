"""The engine of one rank: runs planned steps in order, on a thread of its own."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Final

import numpy as np
import torch

from skiff_runtime import log
from skiff_runtime.config import Config
from skiff_runtime.distributed.tensor_parallel import TensorParallelGroup
from skiff_runtime.engine.cpu import StepThreads, avoid_trapping_amx
from skiff_runtime.engine.decode_graph import DecodeGraphRunner
from skiff_runtime.engine.forward_pass import HiddenStates
from skiff_runtime.engine.free_memory import allocatable_bytes
from skiff_runtime.engine.grammar_masks import GrammarMaskManager, mask_fill_threads
from skiff_runtime.engine.graph_captures import CaptureTask, GraphCaptures, order_captures
from skiff_runtime.engine.graph_memory import MemoryProfile
from skiff_runtime.engine.input_batch import InputBatch, SlotTables
from skiff_runtime.engine.logits_processors import LogitsProcessors
from skiff_runtime.engine.logprobs import DevicePromptLogprobs, LogprobsGatherer
from skiff_runtime.engine.lora_adapters import AdapterCopy, LoraAdapters
from skiff_runtime.engine.memory_profile import profile_memory
from skiff_runtime.engine.memory_profile_cache import MemoryProfileCache, describe_start
from skiff_runtime.engine.model_runner import ModelRunner, PhaseCallback, effective_max_model_len
from skiff_runtime.engine.pooler import DevicePooled, PooledRows, Pooler
from skiff_runtime.engine.prefill_graph import PrefillGraphRunner
from skiff_runtime.engine.sampler import Sampler
from skiff_runtime.engine.sampling_pipeline import SamplingPipeline
from skiff_runtime.engine.staging_buffers import upload
from skiff_runtime.engine.step_output import StepOutput
from skiff_runtime.messages import CompiledGrammar, SamplingSpec
from skiff_runtime.models.config import ModelConfig
from skiff_runtime.models.footprint import count_parameters
from skiff_runtime.step import SlotOpened, StepHandle, StepPlan, StepResult

WARMUP_TOKENS: Final = 16
MIN_COLLECTIVE_TIMEOUT_SECONDS: Final = 30.0
"""Lower bound of a rank's wait inside a collective: another rank may be compiling a kernel for ten seconds or more."""
BUSY_SECONDS: Final = 0.25
"""Time after a launch for which the engine counts as busy for background work; longer than most steps."""
WARMUP_SAMPLING: Final = SamplingSpec(
    max_tokens=2,
    seed=0,
    top_k=2,
    top_p=0.5,
    min_tokens=2,
    frequency_penalty=1.0,
    repetition_penalty=1.1,
    logit_bias=((0, 1.0),),
    logprobs=1,
    prompt_logprobs=1,
)
"""Uses every stage of the sampling pipeline, except for grammars."""
WARMUP_FILTERS: Final = SamplingSpec(max_tokens=1, seed=0, top_k=2, top_p=0.5, min_p=0.1)
"""With tensor parallelism, such rows are sampled by kernels that other rows do not use."""


class _LaunchedStep(StepHandle):
    """A launched step; ``result`` raises the error of a step that failed, or of a collective that timed out."""

    def __init__(self, future: "Future[StepOutput]", group: TensorParallelGroup) -> None:
        self._future = future
        self._group = group

    def wait(self, timeout_seconds: float) -> bool:
        done = self._wait(timeout_seconds)
        self._group.check()  # also while it runs: behind a failed collective the next one may wait for ever
        return done

    def _wait(self, timeout_seconds: float) -> bool:
        deadline = monotonic() + timeout_seconds
        try:
            error = self._future.exception(timeout_seconds)
        except TimeoutError:
            return False
        return error is not None or self._future.result().wait(deadline - monotonic())

    def result(self) -> StepResult:
        result = self._future.result().result()
        self._group.check()
        return result


class Engine:
    """Implements ``step.StepEngine``. A plan must not change after its launch."""

    def __init__(
        self, config: Config, model: ModelConfig, group: TensorParallelGroup, *, on_phase: PhaseCallback
    ) -> None:
        """Load the model and allocate the KV cache; ``on_phase`` is called with each start phase and its progress."""
        self._on_phase = on_phase
        self._group = group
        self._collective_timeout = collective_timeout(config)
        self._step_timeout = max(self._collective_timeout, config.watchdog_timeout or 0.0)
        self._page_size = config.page_size
        self._is_sharded = group.tp_size > 1
        if group.device.type == "cpu" and config.dtype != "float32":
            avoid_trapping_amx()
        threads = config.cpu_threads or torch.get_num_threads()
        torch.set_num_threads(threads)
        self._threads = StepThreads(threads, count_parameters(model, group.tp_size).total)
        self._grammar_masks = GrammarMaskManager(
            config.max_running_requests, model, threads=mask_fill_threads(group.device, group.tp_size)
        )
        self._runner = ModelRunner(config, model, group, on_phase=on_phase)
        context = effective_max_model_len(config, model)
        self._tables = SlotTables(config.max_running_requests, context, config.page_size, group.device)
        self._lora: LoraAdapters | None = None
        if config.enable_lora:
            self._tables.enable_lora()
            self._lora = LoraAdapters(
                self._runner.lora_layers,
                max_rank=config.max_lora_rank,
                base_names=_base_names(config, model),
            )
        self._logprobs = LogprobsGatherer(config.max_running_requests)
        self._pooler = Pooler(self._runner)
        processors = LogitsProcessors(
            self._tables.tokens, vocab_size=model.vocab_size, eos_token_ids=model.eos_token_ids
        )
        self._sampler = Sampler(self._tables.padding_slot + 1, group.device, self._runner.vocab_shard)
        self._sampling = SamplingPipeline(
            self._tables,
            self._sampler,
            logprobs=self._logprobs,
            processors=processors,
            grammar_masks=self._grammar_masks,
        )
        self._decode_graphs: DecodeGraphRunner | None = None
        self._prefill_graphs: PrefillGraphRunner | None = None
        self._profile_cache: MemoryProfileCache | None = None
        self._memory_profile = self._allocate(config, model)
        self._captures = self._plan_captures(config)
        self._launched_at = monotonic()
        self._no_rows = torch.empty(0, dtype=torch.int32, device=group.device)
        self._warmup_tokens = min(WARMUP_TOKENS, context - 1, self.num_pages * config.page_size - 1)
        self._thread = ThreadPoolExecutor(
            1, thread_name_prefix="engine", initializer=_prepare_thread, initargs=(threads, group.device)
        )

    def _allocate(self, config: Config, model: ModelConfig) -> MemoryProfile | None:
        """Allocate the KV cache in the memory that remains, and on a GPU the graph runners; return a GPU's profile."""
        runner, tables = self._runner, self._tables
        on_gpu = runner.device.type == "cuda"
        tables.set_padding_page(runner.pool.num_pages, block_table=runner.backend.needs_block_table)
        if on_gpu:
            tables.enable_shared_prefix(
                0 if config.disable_cascade_attn else runner.backend.shared_prefix_rows
            )
        # The profile runs over a pool of one page; the pool that replaces it has another padding page.
        profile = None
        if on_gpu:
            self._profile_cache = self._open_profile_cache(config, model)
            profile = profile_memory(
                config,
                model,
                runner,
                tables,
                self._sampler,
                cache=self._profile_cache,
                all_ranks=self._all_ranks,
            )
        runner.allocate_kv_cache(None if profile is None else profile.reserved_bytes)
        tables.set_padding_page(runner.pool.num_pages, block_table=runner.backend.needs_block_table)
        if not on_gpu:
            return None
        if runner.backend.supports_cuda_graphs:
            self._decode_graphs = DecodeGraphRunner(runner, tables, self._sampler, rows=config.running_limit)
            self._prefill_graphs = PrefillGraphRunner(runner, tokens=config.max_num_batched_tokens)
        torch.cuda.synchronize()  # steps run on another stream than the one that allocated all this
        return profile

    def _open_profile_cache(self, config: Config, model: ModelConfig) -> MemoryProfileCache | None:
        if config.disable_memory_profile_cache or config.kernel_cache_dir is None:
            return None
        device = self._runner.device
        key = describe_start(
            config, model, tp_rank=self._group.tp_rank, backend=self._runner.backend.describe(), device=device
        )
        total = torch.cuda.get_device_properties(device).total_memory
        return MemoryProfileCache(Path(config.kernel_cache_dir), key, max_bytes=total)

    def _all_ranks(self, ok: bool) -> bool:
        """Return True if ``ok`` is True on every rank. Collective: blocks until all ranks have called it."""
        return self._group.all_reduce_min(int(ok)) == 1

    def _plan_captures(self, config: Config) -> GraphCaptures:
        """Make the tasks that capture the graphs; none on a CPU or without graphs."""
        decode, prefill, profile = self._decode_graphs, self._prefill_graphs, self._memory_profile
        early: list[CaptureTask] = []
        deferred: list[CaptureTask] = []
        if (
            decode is not None
            and prefill is not None
            and profile is not None
            and not config.disable_cuda_graph
        ):
            early, deferred = order_captures(
                decode.capture_tasks(profile.decode_graphs), prefill.capture_tasks(profile.prefill_graphs)
            )
        return GraphCaptures(early, deferred, has_room=self._has_room, all_ranks=self._all_ranks)

    def _has_room(self, needed: int) -> bool:
        """Return whether ``needed`` bytes of the GPU can be taken, and the largest step still fits."""
        assert self._memory_profile is not None
        return allocatable_bytes(self._runner.device) >= needed + self._memory_profile.step_bytes

    def _check_memory_profile(self) -> None:
        """Compare the profile, once the first graphs are captured, with what is free then.

        If the graphs that are left do not fit, the profile is not kept, so the next start measures anew. If not even the
        largest step fits, the graphs so far are released, and steps run without any.
        """
        if self._decode_graphs is None or self._memory_profile is None:
            return
        if self._all_ranks(self._has_room(self._captures.deferred_bytes)):
            return
        log.warning("memory_profile_dropped", reason="less memory is free than the profile promised")
        if self._profile_cache is not None:
            self._profile_cache.remove()
        if not self._all_ranks(self._has_room(0)):
            self._captures.give_up()
            self._thread.submit(self._decode_graphs.release_graphs).result()

    @property
    def num_pages(self) -> int:
        """Number of pages of the KV cache; their ids are 0 to ``num_pages - 1``."""
        return self._runner.pool.num_pages

    def load_grammar(self, grammar: CompiledGrammar) -> "Future[None] | None":
        """Start to load the grammar of a request before it is admitted; None if it is loaded already."""
        return self._grammar_masks.load(grammar)

    def launch(self, plan: StepPlan) -> StepHandle:
        """Queue the step after those launched before it, and return at once."""
        self._launched_at = monotonic()
        self._grammar_masks.open(plan.opened)  # now, so that grammars load while earlier steps run
        copies: list[tuple[int, AdapterCopy]] = []
        if plan.lora_loads:
            assert self._lora is not None
            # Now, because they may be unregistered before the step runs.
            copies = self._lora.find(plan.lora_loads)
        return _LaunchedStep(self._thread.submit(self._run, plan, copies), self._group)

    def register_adapter(self, adapter_id: int, path: str) -> None:
        """Read and check the LoRA adapter in the directory ``path``, on any thread, while steps run.

        Raises ``ModelError`` if it cannot be served. Plans may load it into LoRA slots from now on.
        """
        assert self._lora is not None
        self._lora.register(adapter_id, Path(path))

    def unregister_adapter(self, adapter_id: int) -> None:
        """Free a LoRA adapter's host memory; a slot that it is in keeps it."""
        assert self._lora is not None
        self._lora.unregister(adapter_id)

    @property
    def num_deferred_graphs(self) -> int:
        """Number of captures that plans must still carry (``StepPlan.captures_graph``)."""
        return self._captures.num_deferred

    def warmup(self, *, defer_captures: bool = False) -> None:
        """Run a prefill and a decode step through everything, and capture the graphs, before the first request comes.

        With ``defer_captures``, only those of few rows; the others are captured as the plans of steps say. It leaves
        nothing that a request could see: a slot's tokens and pages are set anew when it opens.
        """
        self._on_phase("warmup", 0.0)
        prompt = self._warmup_tokens
        pages = -(-(prompt + 1) // self._page_size)
        opened = SlotOpened(0, np.zeros(prompt, dtype=np.int32), WARMUP_SAMPLING, prompt)
        self.launch(_plan_row(0, prompt, decode=False, opened=(opened,), pages=pages)).result()
        self.launch(_plan_row(prompt, 1, decode=True)).result()
        if self._is_sharded:
            opened = replace(opened, sampling=WARMUP_FILTERS)
            self.launch(_plan_row(0, prompt, decode=False, opened=(opened,), pages=pages)).result()
        if self._lora is not None:  # slot 0 is empty, but the kernels run
            opened = SlotOpened(0, np.zeros(prompt, dtype=np.int32), WARMUP_SAMPLING, prompt, lora_slot=0)
            self.launch(_plan_row(0, prompt, decode=False, opened=(opened,), pages=pages)).result()
            self.launch(_plan_row(prompt, 1, decode=True)).result()
        while self._captures.num_early:
            self._thread.submit(self._captures.capture_early).result()
        self._check_memory_profile()
        while self._captures.num_deferred and not defer_captures:
            self._thread.submit(self._captures.capture_deferred).result()
        if self._captures.num_deferred:
            log.event("graphs_deferred", sizes=self._captures.num_deferred)
        # During the start one rank may compile many kernels that another one finds in the cache.
        self._group.set_timeout(self._collective_timeout)

    def prepare_grammars(self) -> None:
        """Start to import what grammars need, on a GPU; a CPU has no core to spare, so there the first grammar does."""
        if self._runner.device.type == "cuda":
            self._grammar_masks.prepare(self._is_busy)

    def _is_busy(self) -> bool:
        """Return whether a step was launched within the last ``BUSY_SECONDS``."""
        return monotonic() - self._launched_at < BUSY_SECONDS

    def close(self) -> None:
        """Wait for launched steps, and end the threads."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._grammar_masks.close()

    def _capture_deferred(self) -> None:
        """Capture the next deferred graph, between two steps of the engine's thread."""
        self._group.set_timeout(self._step_timeout)
        self._captures.capture_deferred()
        self._group.set_timeout(self._collective_timeout)

    @torch.inference_mode()
    def _run(self, plan: StepPlan, copies: Sequence[tuple[int, AdapterCopy]]) -> StepOutput:
        if plan.captures_graph:
            self._capture_deferred()
        if copies:
            assert self._lora is not None
            self._lora.load(copies)
        if len(plan.slots) == 0:
            return StepOutput(self._no_rows)
        self._threads.set_for(plan.num_tokens)
        self._tables.apply(plan)
        self._sampling.open(plan.opened)
        self._pooler.open(plan.opened)
        if self._decode_graphs is not None and self._decode_graphs.can_run(plan):
            filtered = self._sampling.find_filtered(plan.slots)
            return self._sampling.resample(*self._decode_graphs.run(plan, filtered))
        batch = self._tables.make_batch(plan)
        hidden, prompts, pooled = self._forward(plan, batch)
        if len(batch.logits_indices) == 0:
            return StepOutput(batch.logits_indices, prompts=prompts, pooled=pooled)
        return self._sampling.sample(batch.sampled, self._runner.logits(hidden), prompts, pooled)

    def _forward(
        self, plan: StepPlan, batch: InputBatch
    ) -> tuple[HiddenStates, Sequence[DevicePromptLogprobs], Sequence[DevicePooled]]:
        """Return the hidden states [S, hidden] of the sampled rows' last tokens, and what is computed of prompts.

        These are log-probabilities and vectors.
        """
        counts = self._logprobs.count_prompt_positions(plan)
        rows = self._pooler.find_rows(plan)
        if self._prefill_graphs is not None and self._prefill_graphs.can_run(plan):
            hidden = self._prefill_graphs.run(batch)
        elif counts.any() or (rows is not None and rows.means) or batch.lora_slots is not None:
            hidden = self._runner.forward(batch.inputs, batch.attention, batch.lora_slots)
        else:
            return self._forward_selected(batch, rows)
        prompts = self._logprobs.compute_prompts(plan, counts, hidden, self._runner, self._tables.tokens)
        pooled: list[DevicePooled] = []
        if rows is not None:
            last = hidden.select(upload(rows.last_indices, self._runner.device))
            pooled = [*self._pooler.pool_last(rows, last), *self._pooler.pool_means(rows, hidden)]
        return hidden.select(batch.logits_indices), prompts, pooled

    def _forward_selected(
        self, batch: InputBatch, rows: PooledRows | None
    ) -> tuple[HiddenStates, Sequence[DevicePromptLogprobs], Sequence[DevicePooled]]:
        """Do what ``_forward`` does where no row needs the hidden states of all of its tokens."""
        indices = batch.logits_indices
        if rows is None:
            return self._runner.forward_selected(batch.inputs, batch.attention, indices), (), ()
        count = len(indices)
        indices = torch.cat([indices, upload(rows.last_indices, self._runner.device)])
        hidden = self._runner.forward_selected(batch.inputs, batch.attention, indices)
        pooled = self._pooler.pool_last(rows, hidden.select(slice(count, None)))
        return hidden.select(slice(count)), (), pooled


def collective_timeout(config: Config) -> float:
    """Return the seconds that a rank waits for another one in a peer-to-peer collective of a step.

    All ranks launch the same steps at the same time, so this is half the limit on the step itself: the error that names
    the collective comes before the step watchdog's, but for a limit that is too short for both.
    """
    return max(MIN_COLLECTIVE_TIMEOUT_SECONDS, (config.watchdog_timeout or 0.0) / 2)


def _base_names(config: Config, model: ModelConfig) -> frozenset[str]:
    """Return the last parts of the names by which an adapter may call the model."""
    names = config.model, str(model.path), config.served_model_name or ""
    return frozenset(Path(name).name for name in names if name)


def _plan_row(
    start: int, length: int, *, decode: bool, opened: tuple[SlotOpened, ...] = (), pages: int = 0
) -> StepPlan:
    """Plan a step of slot 0 alone, whose pages 0 to ``pages - 1`` are set to the same ids."""
    one = np.ones(1, dtype=np.int32)
    columns = np.arange(pages, dtype=np.int32)
    return StepPlan(
        number=0,
        slots=0 * one,
        starts=start * one,
        lengths=length * one,
        samples=np.ones(1, dtype=np.bool_),
        decode_rows=int(decode),
        opened=opened,
        page_slots=0 * columns,
        page_columns=columns,
        page_ids=columns,
    )


def _prepare_thread(threads: int, device: torch.device) -> None:
    torch.set_num_threads(threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
