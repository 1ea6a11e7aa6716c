"""Grammar masks: token bitmasks of the rows whose answers must match a grammar.

The mask of a row's next token is filled on a thread as soon as the token before it is known, while the model's next
forward pass runs, and is waited for just before the next token is sampled. A grammar is loaded on another thread, before
its request is admitted. xgrammar is imported there, too (on a GPU once the service is ready), because many small services
never need it, and its import, of which transformers takes most, would delay the start.
"""

import gc
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from threading import Event, Lock
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from numpy.typing import NDArray

from skiff_runtime import log
from skiff_runtime.engine.input_batch import SampledRows
from skiff_runtime.engine.paced_imports import paced_imports
from skiff_runtime.engine.staging_buffers import upload
from skiff_runtime.engine.step_output import StepOutput
from skiff_runtime.errors import ModelError
from skiff_runtime.kernels.token_bitmask import apply_token_bitmask, bitmask_words
from skiff_runtime.messages import CompiledGrammar
from skiff_runtime.models.config import ModelConfig
from skiff_runtime.step import Int32, SlotOpened

if TYPE_CHECKING:
    from skiff_runtime.grammar.loaded_cache import LoadedGrammarCache
    from skiff_runtime.grammar.matcher import BatchGrammarMatcher, GrammarMatcher

MAX_FILL_THREADS: Final = 8
RowIndices = NDArray[np.int64]
_LOAD_ERRORS = (ModelError, RuntimeError, ValueError)


class GrammarMaskManager:
    """The grammar matchers of all slots, and the threads that load grammars and fill masks.

    ``open`` is called by the thread that launches steps, ``apply_masks`` and ``accept_tokens`` by the thread that runs
    them. A slot opens only after every step with a row of it has run, but the mask after its last token may still be
    in the making then; so opening waits for it.
    """

    def __init__(self, slots: int, model: ModelConfig, *, threads: int) -> None:
        """``threads`` threads fill the masks of several rows in parallel."""
        self._model = model
        self._threads = threads
        self._has_grammar = np.zeros(slots, dtype=np.bool_)
        self._masks = np.zeros((slots, bitmask_words(model.vocab_size)), dtype=np.int32)
        self._matchers: list[GrammarMatcher | None] = [None] * slots
        """None where the slot's grammar could not be loaded."""
        self._pending: list[Future[None] | None] = [None] * slots
        """The task that still works on the slot's mask."""
        self._batch: BatchGrammarMatcher | None = None
        self._cache: LoadedGrammarCache | None = None
        self._cache_lock = Lock()
        self._is_wanted = Event()
        """Set by the first grammar, which must not wait for a paced import."""
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="grammar-reader")
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="grammar-loader")
        self._filler = ThreadPoolExecutor(1, thread_name_prefix="grammar-filler")

    def prepare(self, is_busy: Callable[[], bool]) -> None:
        """Start to import xgrammar and to read the vocabulary, so that the first grammar need not wait for it.

        The import proceeds while the engine is idle; while ``is_busy``, only very slowly.
        """
        self._loader.submit(self._prepare, is_busy)

    def load(self, grammar: CompiledGrammar) -> "Future[None] | None":
        """Start to load a grammar before a slot opens with it; None if it is in the cache.

        A grammar that cannot be loaded is reported when its slot opens.
        """
        if self._cache is not None and grammar.key in self._cache:
            return None
        self._is_wanted.set()
        return self._reader.submit(self._load, grammar)

    def open(self, opened: Sequence[SlotOpened]) -> None:
        """Start matchers for newly opened slots; a grammar that is not in the cache yet is loaded now."""
        for each in opened:
            self._has_grammar[each.slot] = each.grammar is not None
            if each.grammar is not None:
                self._is_wanted.set()
                before = self._pending[each.slot]
                self._pending[each.slot] = self._loader.submit(self._start_matcher, each, before)

    def applies_to(self, slots: Int32) -> NDArray[np.bool_]:
        """Return which of these slots have a grammar."""
        return self._has_grammar[slots]

    def apply_masks(self, logits: torch.Tensor, rows: SampledRows) -> RowIndices:
        """Mask logits float32[S, vocab] in place, in the rows that have a grammar, once their masks are filled.

        Returns the rows whose answers cannot continue, because their grammar admits no token or could not be loaded.
        """
        guided = np.flatnonzero(self._has_grammar[rows.host_slots])
        if len(guided) == 0:
            return guided
        matchers = [self._wait_for_matcher(int(slot)) for slot in rows.host_slots[guided]]
        masked = guided[[each is not None and each.is_active for each in matchers]]
        if len(masked):
            masks = upload(self._masks[rows.host_slots[masked]], logits.device)
            apply_token_bitmask(logits, upload(masked, logits.device), masks)
        return guided[[each is None or each.is_stuck for each in matchers]]

    def accept_tokens(self, rows: SampledRows, output: StepOutput) -> None:
        """Have the matchers accept this step's tokens and fill the next masks, as soon as the tokens have arrived."""
        active = []
        for row in np.flatnonzero(self._has_grammar[rows.host_slots]).tolist():
            matcher = self._matchers[rows.host_slots[row]]
            if matcher is not None and matcher.is_active:
                active.append((row, matcher))
        if active:
            future = self._filler.submit(self._accept_and_fill, rows.host_slots, active, output)
            for row, _ in active:
                self._pending[rows.host_slots[row]] = future

    def close(self) -> None:
        """Wait for running tasks, and end the threads."""
        self._reader.shutdown(wait=True, cancel_futures=True)
        self._loader.shutdown(wait=True, cancel_futures=True)
        self._filler.shutdown(wait=True, cancel_futures=True)

    def _wait_for_matcher(self, slot: int) -> "GrammarMatcher | None":
        """Return the slot's matcher, once its mask is filled."""
        pending = self._pending[slot]
        if pending is not None:
            pending.result()
        return self._matchers[slot]

    def _prepare(self, is_busy: Callable[[], bool]) -> None:
        with paced_imports(self._is_wanted, is_busy):
            self._open_cache()
        gc.freeze()  # as ``Child.report_ready`` does: no later collection scans the objects of transformers

    def _load(self, grammar: CompiledGrammar) -> None:
        with suppress(*_LOAD_ERRORS):
            self._open_cache().get(grammar)

    def _start_matcher(self, opened: SlotOpened, before: "Future[None] | None") -> None:
        """Make a slot's matcher, let it accept the output so far, and fill its first mask."""
        from skiff_runtime.grammar.matcher import GrammarMatcher

        if before is not None:
            before.result()  # it still writes the same line of the masks, for the request that had the slot before
        assert opened.grammar is not None
        self._matchers[opened.slot] = None
        try:
            grammar = self._open_cache().get(opened.grammar)
        except _LOAD_ERRORS as error:
            log.error("grammar_load_failed", error=str(error))
            return
        matcher = GrammarMatcher(grammar, self._masks[opened.slot])
        matcher.accept(opened.tokens[opened.prompt_tokens :].tolist())
        self._matchers[opened.slot] = matcher

    def _accept_and_fill(
        self, host_slots: Int32, active: Sequence[tuple[int, "GrammarMatcher"]], output: StepOutput
    ) -> None:
        """Do the filler thread's part of ``accept_tokens``."""
        from skiff_runtime.grammar.matcher import BatchGrammarMatcher

        if self._batch is None:
            self._batch = BatchGrammarMatcher(self._masks, self._threads)
        tokens = output.tokens()
        # A row without a token (NaN, or a stuck grammar) has a negative one; its request ends.
        going = [(row, matcher) for row, matcher in active if tokens[row] >= 0]
        self._batch.accept(
            [matcher for _, matcher in going],
            [int(host_slots[row]) for row, _ in going],
            [int(tokens[row]) for row, _ in going],
        )

    def _open_cache(self) -> "LoadedGrammarCache":
        from skiff_runtime.grammar.loaded_cache import LoadedGrammarCache
        from skiff_runtime.grammar.tokenizer_info import read_tokenizer_info

        with self._cache_lock:  # both the reader and the loader thread open it
            if self._cache is None:
                self._cache = LoadedGrammarCache(read_tokenizer_info(self._model))
            return self._cache


def mask_fill_threads(device: torch.device, tp_size: int) -> int:
    """Return the number of threads that fill the masks of one of ``tp_size`` ranks on this machine.

    On a GPU it is half of a rank's share of the cores: the other half launches kernels and serves HTTP. On a CPU it is
    one, because the model's own threads use every core.
    """
    if device.type != "cuda":
        return 1
    return max(1, min(MAX_FILL_THREADS, len(os.sched_getaffinity(0)) // (2 * tp_size)))
