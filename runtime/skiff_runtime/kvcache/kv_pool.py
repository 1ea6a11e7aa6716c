"""The tensors of the KV cache, and the number of pages that fit. The only module of this package that imports torch."""

from dataclasses import dataclass
from typing import Final

import torch

from skiff_runtime.config import Config
from skiff_runtime.errors import ConfigError

MIN_TOKENS: Final = 2
"""The smallest request that can be served: one token in, one token out."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of one rank's KV cache.

    ``windows`` has the sliding window of each layer in tokens, None for full attention; empty if no layer has one.
    Windows change what is read, not what is kept: a page holds its tokens for all layers.
    """

    layers: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    windows: tuple[int | None, ...] = ()

    def window(self, layer: int) -> int | None:
        """Return the sliding window of a layer; None if it attends to the whole context."""
        return self.windows[layer] if self.windows else None

    @property
    def distinct_windows(self) -> list[int | None]:
        """Every window that a layer has, in the order of the layers; [None] without sliding windows."""
        return list(dict.fromkeys(self.windows)) or [None]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers, K and V."""
        return 2 * self.layers * self.page_size * self.kv_heads * self.head_dim * self.dtype.itemsize


class KVPool:
    """K and V of every page, for each layer: [num_pages + 1, page_size, kv_heads, head_dim].

    The last page is the padding page, which stays zero. Padding rows and columns read it, so what an
    attention mask hides is a finite number whatever the other pages hold: a masked NaN would still
    spread, since 0 * NaN is NaN.
    """

    def __init__(self, layout: KVLayout, num_pages: int, device: torch.device) -> None:
        self.layout = layout
        self.num_pages = num_pages
        self.device = device
        shape = (2, num_pages + 1, layout.page_size, layout.kv_heads, layout.head_dim)
        self._layers = []
        for _ in range(layout.layers):
            k, v = torch.zeros(shape, dtype=layout.dtype, device=device).flatten(1, 2).unbind()
            self._layers.append((k, v))

    @property
    def padding_offset(self) -> int:
        """KV offset of the first token of the padding page."""
        return self.num_pages * self.layout.page_size

    def layer_kv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of one layer by KV offset: [(num_pages + 1) * page_size, kv_heads, head_dim] each."""
        return self._layers[layer]


def plan_capacity(
    config: Config, layout: KVLayout, *, free_bytes: int, reserved_bytes: int, max_model_len: int
) -> int:
    """Return the number of KV pages to allocate on one rank, without the padding page.

    ``free_bytes``: memory that the weights leave to this rank, of which the computation needs ``reserved_bytes``.
    With ``max_total_tokens`` the capacity is exactly that. Otherwise it is ``mem_fraction_static`` of the
    free memory less the reserved bytes; on a CPU at most what all running requests can fill. Raises
    ``ConfigError``, which names the flags to change, when no request or not ``max_total_tokens`` would fit.
    """
    if config.max_total_tokens is not None:
        return _plan_exact_capacity(config.max_total_tokens, layout, free_bytes - reserved_bytes)
    usable = int(free_bytes * config.mem_fraction_static) - reserved_bytes
    pages = usable // layout.page_bytes - 1
    if config.device == "cpu":
        longest = -(-max_model_len // layout.page_size)
        pages = min(pages, longest * config.max_running_requests)
    if pages * layout.page_size < MIN_TOKENS:
        raise ConfigError(
            f"no room for a KV cache: {_mib(free_bytes)} MiB are free, the computation needs "
            f"{_mib(reserved_bytes)} MiB of them, and one page takes {_mib(layout.page_bytes)} MiB; raise --mem-fraction-static, or lower "
            "--max-num-batched-tokens, --max-model-len, --max-running-requests or --page-size"
        )
    return pages


def _plan_exact_capacity(tokens: int, layout: KVLayout, usable_bytes: int) -> int:
    pages = tokens // layout.page_size
    needed = (pages + 1) * layout.page_bytes
    if needed > usable_bytes:
        raise ConfigError(
            f"--max-total-tokens {tokens} takes {_mib(needed)} MiB, but {_mib(max(usable_bytes, 0))} MiB are free; "
            "lower it, or omit it to size the cache by the free memory"
        )
    return pages


def _mib(count: int) -> str:
    return f"{count / (1 << 20):.4g}"
