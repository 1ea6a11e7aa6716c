"""From logits to tokens: rows that ask for no more than a draw all at once, the others behind them, by what they ask for."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from skiff_runtime.engine.grammar_masks import GrammarMaskManager
from skiff_runtime.engine.input_batch import SampledRows, SlotTables
from skiff_runtime.engine.logits_processors import LogitsProcessors
from skiff_runtime.engine.logprobs import DevicePromptLogprobs, LogprobsGatherer
from skiff_runtime.engine.sampler import Sampler
from skiff_runtime.engine.staging_buffers import upload
from skiff_runtime.engine.step_output import NO_ROWS, Arrival
from skiff_runtime.messages import NO_TOKEN
from skiff_runtime.step import Int32, SlotOpened


class SamplingPipeline:
    """Chooses each row's next token, and enters it into the table; ``NO_TOKEN`` where no token would be right.

    No other row is chosen again for what one row asks for, or changed by it.
    """

    def __init__(
        self,
        tables: SlotTables,
        sampler: Sampler,
        *,
        logprobs: LogprobsGatherer,
        edits: LogitsProcessors,
        guide: GrammarMaskManager,
    ) -> None:
        self._tables = tables
        self._sampler = sampler
        self._logprobs = logprobs
        self._edits = edits
        self._guide = guide

    def open(self, opened: Sequence[SlotOpened]) -> None:
        """Take note of what newly taken slots ask for. Their grammars the guide knows already."""
        for reader in (self._logprobs, self._edits, self._sampler):
            reader.open(opened)

    def choose(
        self, rows: SampledRows, logits: torch.Tensor, prompts: Sequence[DevicePromptLogprobs]
    ) -> Arrival:
        """For rows of logits [S, vocab]; ``prompts`` arrive with their tokens."""
        asking = self._asking(rows.host_slots)
        if not asking.any():
            return Arrival(self._draw(logits, rows), prompts=prompts)
        tokens = torch.empty(len(asking), dtype=torch.int32, device=logits.device)
        plain = np.flatnonzero(~asking)
        if len(plain):
            where, part, own = _take(plain, rows, logits)
            tokens[where] = self._draw(own, part).int()
        return self._choose_as_asked(rows, logits, tokens, np.flatnonzero(asking), prompts)

    def resample(self, rows: SampledRows, logits: torch.Tensor, tokens: torch.Tensor) -> Arrival:
        """For rows whose ``tokens`` int32[S] were chosen from the logits as they are, and stand in the table already."""
        asking = np.flatnonzero(self._asking(rows.host_slots))
        return self._choose_as_asked(rows, logits, tokens, asking, ()) if len(asking) else Arrival(tokens)

    def _asking(self, slots: Int32) -> NDArray[np.bool_]:
        """Which of these slots ask for more than how a token is to be drawn."""
        return self._edits.asking(slots) | self._guide.asking(slots) | self._logprobs.asking(slots)

    def _draw(self, logits: torch.Tensor, rows: SampledRows) -> torch.Tensor:
        """Tokens int[S] from logits as they are, which stand in the table then."""
        tokens = self._sampler.sample(logits, rows)
        self._tables.append(rows, tokens)
        return tokens

    def _choose_as_asked(
        self,
        rows: SampledRows,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        asking: NDArray[np.int64],
        prompts: Sequence[DevicePromptLogprobs],
    ) -> Arrival:
        """Put the tokens of the rows ``asking`` among the others.

        Logits of theirs may be edited in place, where they are float32 and all rows ask: nobody reads them any more.
        """
        where, part, own = _take(asking, rows, logits)
        own = own.float()
        logprobs = self._logprobs.rows(own, part)
        self._edits.apply(own, part)
        stuck = self._guide.restrict(own, part)
        chosen = self._draw(own, part)
        told = None if logprobs is None else logprobs.of(chosen)
        if len(stuck):
            chosen[upload(stuck, chosen.device)] = NO_TOKEN
        tokens[where] = chosen.int()
        told_rows = NO_ROWS if logprobs is None else asking[logprobs.rows].astype(np.int32)
        arrival = Arrival(tokens, told_rows, told, prompts)
        self._guide.follow(rows, arrival)
        return arrival


def _take(
    some: NDArray[np.int64], rows: SampledRows, logits: torch.Tensor
) -> tuple[torch.Tensor, SampledRows, torch.Tensor]:
    """Where ``some`` of the rows are, int64[N] on the device; these rows; and their logits [N, vocab], a copy unless it is all."""
    where = upload(some, logits.device)
    own = logits if len(some) == len(logits) else logits.index_select(0, where)
    return where, rows.take(some, where), own
