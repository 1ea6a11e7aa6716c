"""Chooses each row's next token: greedy, or a draw after temperature, top_k, top_p and min_p in this order.

Parameters live on the device by slot. Draws are stateless (see ``kernels.gumbel``), and a row
is never treated differently because of the other rows of its batch.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from skiff_runtime.engine.batch import SampledRows
from skiff_runtime.engine.staging import upload
from skiff_runtime.kernels.sampling import choose
from skiff_runtime.messages import SamplingParams
from skiff_runtime.step import Int32, SlotOpened

NARROW_TOP_K: Final = 1024
"""Up to this top_k a partial selection is enough; beyond, rows are sorted."""
MIN_TEMPERATURE: Final = 1e-5
"""Below it a draw takes the maximum anyway, but its arithmetic would overflow."""
MAX_TOP_K: Final = 1 << 24
"""More than any vocabulary has, and exact in float32."""
_GREEDY: Final = 0
_DRAW: Final = 1
_NARROW: Final = 2
_SORTED: Final = 3
_HALF: Final = 1 << 63


class Sampler:
    """Sampling parameters of all slots, and the draw."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self._device = device
        self._kinds = np.zeros(slots, dtype=np.int8)
        self._narrow_k = np.zeros(slots, dtype=np.int32)
        self._seeds = torch.zeros(slots, dtype=torch.int64, device=device)
        self._filters = torch.zeros((slots, 4), dtype=torch.float32, device=device)

    def open(self, opened: Sequence[SlotOpened]) -> None:
        """Set the parameters of newly taken slots."""
        if not opened:
            return
        slots = np.array([each.slot for each in opened], dtype=np.int64)
        for each in opened:
            self._kinds[each.slot] = _kind(each.sampling)
            self._narrow_k[each.slot] = min(each.sampling.top_k, MAX_TOP_K)
        where = upload(slots, self._device)
        seeds = np.array([_signed(each.sampling.seed) for each in opened], dtype=np.int64)
        filters = np.array([_row(each.sampling) for each in opened], dtype=np.float32)
        self._seeds.index_copy_(0, where, upload(seeds, self._device))
        self._filters.index_copy_(0, where, upload(filters, self._device))

    @property
    def parameters(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Seeds and filters of all slots, as ``kernels.sampling`` takes them."""
        return self._seeds, self._filters

    def plain(self, slots: Int32) -> bool:
        """Whether none of these slots asks for top_k or top_p."""
        return bool((self._kinds[slots] <= _DRAW).all())

    def sample(self, logits: torch.Tensor, rows: SampledRows) -> torch.Tensor:
        """Tokens int[S] from logits [S, vocab]."""
        kinds = self._kinds[rows.host_slots]
        if logits.device.type == "cuda" or kinds.all():
            return self._choose(logits, rows)
        tokens = logits.argmax(-1)
        drawn = np.flatnonzero(kinds)
        if len(drawn):
            where = torch.from_numpy(drawn)
            tokens[where] = self._choose(logits[where], rows.take(drawn, where))
        return tokens

    def _choose(self, logits: torch.Tensor, rows: SampledRows) -> torch.Tensor:
        floors = None if self.plain(rows.host_slots) else self._floors(logits, rows)
        return choose(logits, rows.slots, rows.positions, *self.parameters, floors)

    def _floors(self, logits: torch.Tensor, rows: SampledRows) -> torch.Tensor:
        """The least scaled logits that top_k and top_p keep: float32[S]."""
        floors = torch.full(logits.shape[:1], -torch.inf, device=logits.device)
        kinds = self._kinds[rows.host_slots]
        for kind in (_NARROW, _SORTED):
            found = np.flatnonzero(kinds == kind)
            if len(found) == 0:
                continue
            where = upload(found, logits.device)
            temperature, top_k, top_p, _ = self._filters[rows.slots[where]].unbind(1)
            scaled = logits[where].float() / temperature[:, None]
            if kind == _NARROW:
                most = min(int(self._narrow_k[rows.host_slots[found]].max()), scaled.shape[1])
                ranked = scaled.topk(most, dim=-1).values
            else:
                ranked = scaled.sort(dim=-1, descending=True).values
            floors[where] = _lowest_kept(ranked, top_k.long(), top_p)
        return floors


def _lowest_kept(ranked: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The least logit that top_k, then top_p, keep: [S], from logits in descending order [S, N].

    top_p keeps the fewest tokens whose share of what top_k left reaches it; ties are kept.
    """
    counts = torch.where(top_k > 0, top_k, ranked.shape[1]).clamp(max=ranked.shape[1])
    weights = (ranked - ranked[:, :1]).exp()
    mass = weights.cumsum(-1, dtype=torch.float64)
    total = mass.gather(1, counts[:, None] - 1)
    before = mass - weights
    kept = (before < top_p[:, None] * total).sum(-1).clamp(min=1)
    return ranked.gather(1, torch.minimum(kept, counts)[:, None] - 1).squeeze(1)


def _kind(sampling: SamplingParams) -> int:
    if sampling.temperature < MIN_TEMPERATURE or sampling.top_k == 1:
        return _GREEDY
    if 0 < sampling.top_k <= NARROW_TOP_K:
        return _NARROW
    return _SORTED if sampling.top_k > 0 or sampling.top_p < 1 else _DRAW


def _row(sampling: SamplingParams) -> tuple[float, int, float, float]:
    """Temperature, top_k, top_p, min_p; a temperature of 0 stands for greedy."""
    greedy = _kind(sampling) == _GREEDY
    return (
        0.0 if greedy else sampling.temperature,
        min(sampling.top_k, MAX_TOP_K),
        sampling.top_p,
        sampling.min_p,
    )


def _signed(seed: int) -> int:
    """The seed's low 64 bits as a signed number."""
    return (seed + _HALF) % (2 * _HALF) - _HALF
