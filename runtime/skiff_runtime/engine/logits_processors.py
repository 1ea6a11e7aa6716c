"""Logits processors: what requests change in their logits before a token is sampled.

These are a bias, penalties, ``min_tokens``, bad words and allowed tokens.

Penalties and bad words keep no state: they read the texts themselves from the table of tokens, where every token stands
as soon as it is sampled. So neither a step in flight nor a preemption can make them wrong, and rows without processors
cost nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from skiff_runtime.engine.input_batch import SampledRows
from skiff_runtime.engine.staging_buffers import upload
from skiff_runtime.kernels.penalties import apply_penalties
from skiff_runtime.messages import SamplingSpec
from skiff_runtime.step import Float32, Int32, SlotOpened

MASKED_LOGIT: Final = -1e30
"""Logit of an end token before ``min_tokens``, and of a token that would complete a bad word.

It is below all others, yet finite, so a grammar can still force the token.
"""
_NO_TOKEN: Final = -1
"""Padding of bad words on the left, up to the longest."""

RowIndices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _LogitBias:
    """Values that are added to the logits of some tokens."""

    tokens: RowIndices
    values: Float32


@dataclass(frozen=True, slots=True)
class _MinTokens:
    """Tokens that would end the answer, masked before position ``until``."""

    tokens: RowIndices
    until: int


@dataclass(frozen=True, slots=True)
class _BadWords:
    """W sequences of tokens. ``ends`` int64[E]: their different last tokens, and ``end_of`` int64[W]: which of them is whose.

    ``prefixes`` int64[W, P]: the P tokens before the last one, padded on the left. Only output is matched, which begins
    at position ``first``.
    """

    ends: NDArray[np.int64]
    end_of: NDArray[np.int64]
    prefixes: NDArray[np.int64]
    first: int


class LogitsProcessors:
    """The logits processors of every slot's request."""

    def __init__(self, token_table: torch.Tensor, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """``token_table`` int32[slots, length] holds every slot's known tokens."""
        slots, device = token_table.shape[0], token_table.device
        self._token_table = token_table
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._has_processor = np.zeros(slots, dtype=np.bool_)
        self._has_penalty = np.zeros(slots, dtype=np.bool_)
        self._biases: dict[int, _LogitBias] = {}
        self._min_tokens: dict[int, _MinTokens] = {}
        self._bad_words: dict[int, _BadWords] = {}
        self._allowed: dict[int, RowIndices] = {}
        self._prompt_tokens = torch.zeros(slots, dtype=torch.int64, device=device)
        self._penalties = torch.zeros((slots, 3), dtype=torch.float32, device=device)

    def open(self, opened: Sequence[SlotOpened]) -> None:
        """Register the processors of newly opened slots."""
        for each in opened:
            slot, sampling = each.slot, each.sampling
            for processors in (self._biases, self._min_tokens, self._bad_words, self._allowed):
                processors.pop(slot, None)
            if sampling.logit_bias:
                self._biases[slot] = self._make_bias(sampling)
            if sampling.min_tokens:
                self._min_tokens[slot] = self._make_min_tokens(each)
            if sampling.bad_words:
                self._bad_words[slot] = self._make_bad_words(each)
            if sampling.allowed_token_ids:
                self._allowed[slot] = self._in_vocabulary(sampling.allowed_token_ids)
            penalties = (
                sampling.repetition_penalty,
                sampling.presence_penalty,
                sampling.frequency_penalty,
            )
            self._has_penalty[slot] = penalties != (1.0, 0.0, 0.0)
            if self._has_penalty[slot]:
                self._prompt_tokens[slot] = each.prompt_tokens
                self._penalties[slot] = upload(np.array(penalties, np.float32), self._penalties.device)
            self._has_processor[slot] = self._has_penalty[slot] or any(
                slot in processors
                for processors in (self._biases, self._min_tokens, self._bad_words, self._allowed)
            )

    def applies_to(self, slots: Int32) -> NDArray[np.bool_]:
        """Return which of these slots have a logits processor."""
        return self._has_processor[slots]

    def apply(self, logits: torch.Tensor, rows: SampledRows) -> None:
        """Process logits float32[S, vocab] in place: bias, penalties, then what masks tokens; allowed tokens come last."""
        processed = np.flatnonzero(self._has_processor[rows.host_slots])
        if len(processed) == 0:
            return
        self._add_biases(logits, rows, processed)
        penalized = processed[self._has_penalty[rows.host_slots[processed]]]
        if len(penalized):
            self._apply_penalties(logits, rows, penalized)
        self._mask_end_tokens(logits, rows, processed)
        self._mask_bad_words(logits, rows, processed)
        self._mask_all_but_allowed(logits, rows, processed)

    def _add_biases(self, logits: torch.Tensor, rows: SampledRows, processed: RowIndices) -> None:
        biased = [(row, bias) for row in processed if (bias := self._biases.get(int(rows.host_slots[row])))]
        if biased:
            values = np.concatenate([bias.values for _, bias in biased])
            cells = _cells([(row, bias.tokens) for row, bias in biased], logits.device)
            logits[cells] += upload(values, logits.device)

    def _mask_end_tokens(self, logits: torch.Tensor, rows: SampledRows, processed: RowIndices) -> None:
        masked = []
        for row in processed:
            min_tokens = self._min_tokens.get(int(rows.host_slots[row]))
            if min_tokens is not None and rows.host_positions[row] < min_tokens.until:
                masked.append((row, min_tokens.tokens))
        if masked:
            logits[_cells(masked, logits.device)] = MASKED_LOGIT

    def _mask_bad_words(self, logits: torch.Tensor, rows: SampledRows, processed: RowIndices) -> None:
        """Mask the last token of each bad word whose other tokens are the last ones of the output.

        The output is compared on the device: the host does not know yet what the step before has sampled.
        """
        found = [
            (row, words)
            for row in processed
            if (words := self._bad_words.get(int(rows.host_slots[row]))) is not None
        ]
        if not found:
            return
        length = max(words.prefixes.shape[1] for _, words in found)
        first_ends = np.cumsum([0, *(len(words.ends) for _, words in found)])
        packed = upload(
            np.concatenate(
                [
                    _pack_bad_words(row, words, length, int(first_end))
                    for (row, words), first_end in zip(found, first_ends, strict=False)
                ]
            ),
            logits.device,
        )
        # Several words of a row may end with the same token, whose logit is written once.
        is_masked = torch.zeros(int(first_ends[-1]), dtype=torch.int32, device=logits.device)
        is_masked.scatter_reduce_(0, packed[:, 1], self._match_bad_words(packed, rows, length).int(), "amax")
        cells = _cells([(row, words.ends) for row, words in found], logits.device)
        values = logits[cells]
        logits[cells] = torch.where(is_masked > 0, values.clamp(max=MASKED_LOGIT), values)

    def _match_bad_words(self, packed: torch.Tensor, rows: SampledRows, length: int) -> torch.Tensor:
        """Return bool[W]: the output of the word's row ends with all but the last of its tokens.

        ``packed`` int64[W, 3 + length] as ``_pack_bad_words`` makes it.
        """
        row_indices, first, prefixes = packed[:, 0], packed[:, 2:3], packed[:, 3:]
        ends = rows.positions[row_indices].long()[:, None]
        positions = ends + torch.arange(-length, 0, device=packed.device)
        known = self._token_table[rows.slots[row_indices].long()[:, None], positions.clamp(min=0)]
        is_same = (known == prefixes) & (positions >= first)
        return (is_same | (prefixes == _NO_TOKEN)).all(dim=1)

    def _mask_all_but_allowed(self, logits: torch.Tensor, rows: SampledRows, processed: RowIndices) -> None:
        allowed = [
            (row, tokens)
            for row in processed
            if (tokens := self._allowed.get(int(rows.host_slots[row]))) is not None
        ]
        if allowed:
            cells = _cells(allowed, logits.device)
            kept = logits[cells]
            logits[upload(np.array([row for row, _ in allowed], np.int64), logits.device)] = -torch.inf
            logits[cells] = kept

    def _apply_penalties(self, logits: torch.Tensor, rows: SampledRows, penalized: RowIndices) -> None:
        indices = upload(penalized, logits.device)
        apply_penalties(
            *(logits, indices, rows.slots[indices], rows.positions[indices]),
            *(self._token_table, self._prompt_tokens, self._penalties),
            max_len=int(rows.host_positions[penalized].max()),
        )

    def _make_bias(self, sampling: SamplingSpec) -> _LogitBias:
        """Drop ids outside of the vocabulary; of an id that occurs twice, keep the last value."""
        values = {token: value for token, value in sampling.logit_bias if 0 <= token < self._vocab_size}
        return _LogitBias(np.array(list(values), np.int64), np.array(list(values.values()), np.float32))

    def _make_min_tokens(self, opened: SlotOpened) -> _MinTokens:
        ends = sorted({*self._eos_token_ids, *opened.sampling.stop_token_ids})
        return _MinTokens(self._in_vocabulary(ends), opened.prompt_tokens + opened.sampling.min_tokens)

    def _make_bad_words(self, opened: SlotOpened) -> _BadWords:
        words = [word for word in opened.sampling.bad_words if word and 0 <= word[-1] < self._vocab_size]
        length = max((len(word) - 1 for word in words), default=0)
        prefixes = [[_NO_TOKEN] * (length - len(word) + 1) + list(word[:-1]) for word in words]
        ends, end_of = np.unique(np.array([word[-1] for word in words], np.int64), return_inverse=True)
        return _BadWords(
            ends, end_of, np.array(prefixes, np.int64).reshape(len(words), length), opened.prompt_tokens
        )

    def _in_vocabulary(self, tokens: Sequence[int]) -> RowIndices:
        return np.array([token for token in tokens if 0 <= token < self._vocab_size], np.int64)


def _pack_bad_words(row: int, words: _BadWords, length: int, first_end: int) -> NDArray[np.int64]:
    """Pack the bad words of one row as int64[W, 3 + length].

    Columns: the row; the index of the word's last token in the list of all rows' last tokens, where those of this row begin
    at ``first_end``; the position of the first output token; the tokens before the last one.
    """
    count, own = words.prefixes.shape
    packed = np.full((count, 3 + length), _NO_TOKEN, np.int64)
    packed[:, 0], packed[:, 1], packed[:, 2] = row, first_end + words.end_of, words.first
    packed[:, 3 + length - own :] = words.prefixes
    return packed


def _cells(
    tokens_by_row: Sequence[tuple[int, RowIndices]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (row, token) of every logit to change, int64[N] each, by one upload."""
    rows = np.repeat([row for row, _ in tokens_by_row], [len(tokens) for _, tokens in tokens_by_row])
    packed = np.stack([rows, np.concatenate([tokens for _, tokens in tokens_by_row])])
    row_indices, token_ids = upload(packed, device).unbind()
    return row_indices, token_ids
