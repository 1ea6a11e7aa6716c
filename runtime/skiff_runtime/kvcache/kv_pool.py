"""The tensors behind the pages, and how many pages fit. The only module here that knows torch."""

from dataclasses import dataclass
from typing import Final

import torch

from skiff_runtime.config import Config
from skiff_runtime.errors import ConfigError

MIN_TOKENS: Final = 2
"""The smallest request that can be served: one token in, one token out."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of one rank's KV cache."""

    layers: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype

    @property
    def page_bytes(self) -> int:
        """Bytes that one page takes over all layers, K and V."""
        return 2 * self.layers * self.page_size * self.kv_heads * self.head_dim * self.dtype.itemsize


class KVPool:
    """Per layer, K and V of every page: [num_pages + 1, page_size, kv_heads, head_dim].

    The last page is nobody's and stays zero: padding reads it, so that what an
    attention mask hides is a finite number whatever the real pages hold.
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
    def padding_slot_mapping(self) -> int:
        """The first token place of the page that stays zero."""
        return self.num_pages * self.layout.page_size

    def tokens(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one layer by token place: [(num_pages + 1) * page_size, kv_heads, head_dim]."""
        return self._layers[layer]


def plan_capacity(
    config: Config, layout: KVLayout, *, free_bytes: int, reserved_bytes: int, max_model_len: int
) -> int:
    """How many pages to allocate on one rank.

    ``free_bytes`` is what the rank may take in all, of which ``reserved_bytes`` go to everything
    but the KV cache. With ``max_total_tokens`` the capacity is exactly that; else it is
    ``mem_fraction_static`` of the free memory, on a CPU at most what all running
    requests can fill. Raises ``ConfigError`` that names the flags when it does not fit.
    """
    if config.max_total_tokens is not None:
        return _exact(config, layout, free_bytes - reserved_bytes)
    usable = int(free_bytes * config.mem_fraction_static) - reserved_bytes
    pages = usable // layout.page_bytes - 1
    if config.device == "cpu":
        longest = -(-max_model_len // layout.page_size)
        pages = min(pages, longest * config.max_running_requests)
    if pages * layout.page_size < MIN_TOKENS:
        raise ConfigError(
            f"no room for a KV cache: {_mib(free_bytes)} MiB are free, {_mib(reserved_bytes)} MiB go to the "
            f"computation, and one page takes {_mib(layout.page_bytes)} MiB; raise --mem-fraction-static, or lower "
            "--max-num-batched-tokens, --max-model-len, --max-running-requests or --page-size"
        )
    return pages


def _exact(config: Config, layout: KVLayout, usable_bytes: int) -> int:
    tokens = config.max_total_tokens or 0
    pages = tokens // layout.page_size
    needed = (pages + 1) * layout.page_bytes
    if needed > usable_bytes:
        raise ConfigError(
            f"--max-total-tokens {tokens} takes {_mib(needed)} MiB, but {_mib(max(usable_bytes, 0))} MiB are free; "
            "lower it, or leave it out to fill the free memory"
        )
    return pages


def _mib(count: int) -> str:
    return f"{count / (1 << 20):.4g}"
