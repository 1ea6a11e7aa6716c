"""The sampling pipeline: from logits to tokens.

Rows with sampling parameters alone are sampled together. Rows that request more (a logits processor, a grammar or
log-probabilities) are sampled after them, from float32 logits of their own. With tensor parallelism only these rows'
logits are gathered, and every rank processes them alike: they are few, and what they cost is as if all were gathered
where they are not.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from skiff_runtime.engine.grammar_masks import GrammarMaskManager
from skiff_runtime.engine.input_batch import SampledRows, SlotTables
from skiff_runtime.engine.logits_processors import LogitsProcessors
from skiff_runtime.engine.logprobs import DevicePromptLogprobs, LogprobsGatherer
from skiff_runtime.engine.pooler import DevicePooled
from skiff_runtime.engine.sampler import Sampler
from skiff_runtime.engine.staging_buffers import upload
from skiff_runtime.engine.step_output import NO_ROWS, StepOutput
from skiff_runtime.messages import NO_TOKEN
from skiff_runtime.step import Int32, SlotOpened


class SamplingPipeline:
    """Samples each row's next token and writes it to the token table; ``NO_TOKEN`` where the grammar admits none.

    What one row requests neither changes another row's token nor has it sampled again.
    """

    def __init__(
        self,
        tables: SlotTables,
        sampler: Sampler,
        *,
        logprobs: LogprobsGatherer,
        processors: LogitsProcessors,
        grammar_masks: GrammarMaskManager,
    ) -> None:
        self._tables = tables
        self._sampler = sampler
        self._logprobs = logprobs
        self._processors = processors
        self._grammar_masks = grammar_masks

    def open(self, opened: Sequence[SlotOpened]) -> None:
        """Register newly opened slots with every stage; the grammar masks have been opened at the launch of the step."""
        for stage in (self._logprobs, self._processors, self._sampler):
            stage.open(opened)

    def sample(
        self,
        rows: SampledRows,
        logits: torch.Tensor,
        prompts: Sequence[DevicePromptLogprobs],
        pooled: Sequence[DevicePooled] = (),
    ) -> StepOutput:
        """Sample rows from this rank's logits [S, shard]; ``prompts`` and ``pooled`` go to the host with the tokens."""
        special = self._is_special(rows.host_slots)
        if not special.any():
            return StepOutput(
                self._append(self._sampler.sample(logits, rows), rows), prompts=prompts, pooled=pooled
            )
        tokens = torch.empty(len(special), dtype=torch.int32, device=logits.device)
        plain = np.flatnonzero(~special)
        if len(plain):
            indices, part, own = _select(plain, rows, logits)
            tokens[indices] = self._append(self._sampler.sample(own, part), part).int()
        return self._sample_special(rows, logits, tokens, np.flatnonzero(special), prompts, pooled)

    def resample(self, rows: SampledRows, logits: torch.Tensor, tokens: torch.Tensor) -> StepOutput:
        """Sample the special rows again after a decode graph, which sampled ``tokens`` int32[S] from unprocessed logits.

        The graph has written all of its tokens to the table already.
        """
        special = np.flatnonzero(self._is_special(rows.host_slots))
        if len(special) == 0:
            return StepOutput(tokens)
        return self._sample_special(rows, logits, tokens, special, ())

    def find_filtered(self, slots: Int32) -> NDArray[np.int64]:
        """Return the indices of those rows, by their slots, for which a decode graph has to make the logits whole.

        They have filters and are not sampled again by ``resample``. With one rank there are none. The result depends on
        request parameters alone, so it is the same on all ranks.
        """
        filtered = self._sampler.needs_whole_rows(slots)
        return np.flatnonzero(filtered & ~self._is_special(slots) if filtered.any() else filtered)

    def _is_special(self, slots: Int32) -> NDArray[np.bool_]:
        """Return which of these slots request more than sampling parameters."""
        return (
            self._processors.applies_to(slots)
            | self._grammar_masks.applies_to(slots)
            | self._logprobs.applies_to(slots)
        )

    def _append(self, tokens: torch.Tensor, rows: SampledRows) -> torch.Tensor:
        """Write sampled tokens int[S] to the table; return them."""
        self._tables.append(rows, tokens)
        return tokens

    def _sample_special(
        self,
        rows: SampledRows,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        special: NDArray[np.int64],
        prompts: Sequence[DevicePromptLogprobs],
        pooled: Sequence[DevicePooled] = (),
    ) -> StepOutput:
        """Sample the rows ``special``, and put their tokens among ``tokens``.

        Where all rows are special and the logits are float32, they are processed in place: nothing reads them after this.
        """
        indices, part, own = _select(special, rows, logits)
        own = self._sampler.gather(own).float()
        # Log-probabilities are those of the model, so they are taken first. A grammar has the last word on the logits.
        row_logprobs = self._logprobs.compute_rows(own, part)
        self._processors.apply(own, part)
        stuck = self._grammar_masks.apply_masks(own, part)
        sampled = self._append(self._sampler.sample_whole(own, part), part)
        logprobs = None if row_logprobs is None else row_logprobs.gather(sampled)
        if len(stuck):
            sampled[upload(stuck, sampled.device)] = NO_TOKEN
        tokens[indices] = sampled.int()
        logprob_rows = NO_ROWS if row_logprobs is None else special[row_logprobs.rows].astype(np.int32)
        output = StepOutput(tokens, logprob_rows, logprobs, prompts, pooled)
        # The filler thread waits for the tokens, not this one, which goes on to launch the next step.
        self._grammar_masks.accept_tokens(rows, output)
        return output


def _select(
    some: NDArray[np.int64], rows: SampledRows, logits: torch.Tensor
) -> tuple[torch.Tensor, SampledRows, torch.Tensor]:
    """Return the indices int64[N] of ``some`` rows on the device, these rows, and their logits [N, shard].

    The logits are a copy, unless the rows are all there are.
    """
    indices = upload(some, logits.device)
    own = logits if len(some) == len(logits) else logits.index_select(0, indices)
    return indices, rows.select(some, indices), own
