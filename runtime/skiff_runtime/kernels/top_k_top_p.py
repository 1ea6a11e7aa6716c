"""Thresholds that top-k and top-p set on rows of scaled logits, found by ranking them.

The reference of ``triton.sampling.top_k_top_p``, which finds the same without sorting.
"""

from typing import Final

import torch

MAX_PARTIAL_TOP_K: Final = 1024
"""The largest top_k for which ``torch.topk`` is used; rows with a larger one are sorted."""


def find_thresholds(scaled: torch.Tensor, sampling_params: torch.Tensor) -> torch.Tensor:
    """Return the least scaled logit that top_k, then top_p, keep of each row of scaled [S, vocab]: float32 [S].

    ``sampling_params`` float32 [S, 4] are those of ``kernels.sampling.sample_tokens``, one line for each row. Rows
    that request neither get -inf and cost next to nothing. top_p keeps the fewest tokens whose share of what top_k
    kept reaches it; ties are kept.
    """
    temperature, top_k, top_p, _ = sampling_params.unbind(1)
    thresholds = torch.full(scaled.shape[:1], -torch.inf)
    is_searched = (temperature > 0) & (((top_k > 0) & (top_k < scaled.shape[1])) | (top_p < 1))
    is_partial = is_searched & (top_k > 0) & (top_k <= MAX_PARTIAL_TOP_K)
    for selected in (is_partial, is_searched & ~is_partial):
        rows = selected.nonzero().squeeze(1)
        if len(rows) == 0:
            continue
        if selected is is_partial:
            ranked = scaled[rows].topk(min(int(top_k[rows].max()), scaled.shape[1]), dim=-1).values
        else:
            ranked = scaled[rows].sort(dim=-1, descending=True).values
        thresholds[rows] = _lowest_kept(ranked, top_k[rows].long(), top_p[rows])
    return thresholds


def _lowest_kept(ranked: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return the least logit that is kept, [S], of logits in descending order [S, N]."""
    counts = torch.where(top_k > 0, top_k, ranked.shape[1]).clamp(max=ranked.shape[1])
    weights = (ranked - ranked[:, :1]).exp()
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    total = cumulative.gather(1, counts[:, None] - 1)
    before = cumulative - weights
    kept = (before < top_p[:, None] * total).sum(-1).clamp(min=1)
    return ranked.gather(1, torch.minimum(kept, counts)[:, None] - 1).squeeze(1)
