"""The choice of a token from logits, on any device."""

import torch

from skiff_runtime.kernels.floors import find_floors
from skiff_runtime.kernels.gumbel import add_gumbel


def choose(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    seeds: torch.Tensor,
    filters: torch.Tensor,
    history: torch.Tensor | None = None,
) -> torch.Tensor:
    """Tokens int[S] from logits [S, vocab]: the likeliest where the temperature is 0, else a draw.

    ``seeds`` int64[slots] and ``filters`` float32[slots, 4] (temperature, top_k, top_p, min_p) are those of ``slots``
    int[S]; ``positions`` int[S] are where the tokens will stand. Where ``history`` int32[slots, n] is given, the
    tokens are written there at once.
    """
    if logits.device.type == "cuda":
        from skiff_runtime.kernels.fused import sampling

        return sampling.choose(logits, slots, positions, seeds, filters, history)
    filters = filters[slots]
    temperature, _, _, min_p = filters.unbind(1)
    scaled = logits.float() / torch.where(temperature > 0, temperature, 1.0)[:, None]
    lowest = torch.maximum(scaled.amax(-1) + min_p.log(), find_floors(scaled, filters))
    greedy = scaled.argmax(-1)
    scaled.masked_fill_(scaled < lowest[:, None], -torch.inf)
    drawn = add_gumbel(scaled, seeds[slots], positions).argmax(-1)
    tokens = torch.where(temperature > 0, drawn, greedy)
    if history is not None:
        history[slots, positions] = tokens.to(history.dtype)
    return tokens
