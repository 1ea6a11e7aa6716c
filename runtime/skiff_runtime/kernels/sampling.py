"""The choice of a token from logits, on any device."""

import torch

from skiff_runtime.kernels.gumbel import add_gumbel
from skiff_runtime.kernels.top_k_top_p import find_thresholds
from skiff_runtime.step import NAN_LOGITS


def choose(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    seeds: torch.Tensor,
    filters: torch.Tensor,
    history: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sample tokens int[S] from logits [S, vocab]: the likeliest where the temperature is 0, else a draw.

    A row that contains NaN gets ``NAN_LOGITS``.

    ``seeds`` int64[slots] and ``filters`` float32[slots, 4] (temperature, top_k, top_p, min_p) are those of ``slots``
    int[S]; ``positions`` int[S] are where the tokens will stand. Where ``history`` int32[slots, n] is given, the
    tokens are written there at once, token 0 for ``NAN_LOGITS``: a step in flight may look up its embedding.
    """
    if logits.device.type == "cuda":
        from skiff_runtime.kernels.triton.sampling import sample_tokens as sampling

        return sampling.choose(logits, slots, positions, seeds, filters, history)
    filters = filters[slots]
    temperature, _, _, min_p = filters.unbind(1)
    scaled = logits.float() / torch.where(temperature > 0, temperature, 1.0)[:, None]
    largest, greedy = scaled.max(-1)  # unlike comparisons, it propagates NaN
    lowest = torch.maximum(largest + min_p.log(), find_thresholds(scaled, filters))
    scaled.masked_fill_(scaled < lowest[:, None], -torch.inf)
    drawn = add_gumbel(scaled, seeds[slots], positions).argmax(-1)
    tokens = torch.where(temperature > 0, drawn, greedy).masked_fill_(largest.isnan(), NAN_LOGITS)
    if history is not None:
        history[slots, positions] = tokens.clamp(min=0).to(history.dtype)
    return tokens
