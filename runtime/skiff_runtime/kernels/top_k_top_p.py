"""What top_k and top_p leave of each row of scaled logits: the least of it, by ranking them.

On a GPU ``kernels.fused.floors`` finds the same.
"""

from typing import Final

import torch

MAX_PARTIAL_TOP_K: Final = 1024
"""Up to this top_k a partial selection is enough; beyond, rows are sorted."""


def find_thresholds(scaled: torch.Tensor, filters: torch.Tensor) -> torch.Tensor:
    """The least scaled logits that top_k, then top_p, keep of scaled [S, vocab]: float32[S].

    ``filters`` float32[S, 4] as ``kernels.sampling.choose`` takes them, of the rows. Rows that ask for neither have -inf, and cost
    next to nothing. top_p keeps the fewest tokens whose share of what top_k left reaches it; ties are kept.
    """
    temperature, top_k, top_p, _ = filters.unbind(1)
    found = torch.full(scaled.shape[:1], -torch.inf)
    asks = (temperature > 0) & (((top_k > 0) & (top_k < scaled.shape[1])) | (top_p < 1))
    narrow = asks & (top_k > 0) & (top_k <= MAX_PARTIAL_TOP_K)
    for chosen in (narrow, asks & ~narrow):
        where = chosen.nonzero().squeeze(1)
        if len(where) == 0:
            continue
        if chosen is narrow:
            ranked = scaled[where].topk(min(int(top_k[where].max()), scaled.shape[1]), dim=-1).values
        else:
            ranked = scaled[where].sort(dim=-1, descending=True).values
        found[where] = _lowest_kept(ranked, top_k[where].long(), top_p[where])
    return found


def _lowest_kept(ranked: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The least logit that is kept: [S], from logits in descending order [S, N]."""
    counts = torch.where(top_k > 0, top_k, ranked.shape[1]).clamp(max=ranked.shape[1])
    weights = (ranked - ranked[:, :1]).exp()
    mass = weights.cumsum(-1, dtype=torch.float64)
    total = mass.gather(1, counts[:, None] - 1)
    before = mass - weights
    kept = (before < top_p[:, None] * total).sum(-1).clamp(min=1)
    return ranked.gather(1, torch.minimum(kept, counts)[:, None] - 1).squeeze(1)
