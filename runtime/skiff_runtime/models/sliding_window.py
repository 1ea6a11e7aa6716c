"""The sliding window of each layer, read from a model's configuration; imports no torch.

A layer with a window of w tokens attends, at position i, to the tokens j with i - w < j <= i; one with full attention
attends to all tokens up to i.
"""

from dataclasses import dataclass
from typing import Final

from skiff_runtime.errors import ModelError
from skiff_runtime.json_file import JsonObject

SlidingWindows = tuple[int | None, ...]
"""The window of each layer in tokens; None for full attention."""

FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"
MAX_WINDOW_LAYERS: Final = 28
"""The first layer with a window, where ``max_window_layers`` does not name it: the default of transformers."""


@dataclass(frozen=True, slots=True)
class WindowDefaults:
    """An architecture's rules for sliding windows, those of its class in transformers.

    ``window`` is the one of a configuration that has no key ``sliding_window``. With ``needs_flag`` it counts only if
    ``use_sliding_window`` is set. With ``by_layer``, ``layer_types`` or ``max_window_layers`` name the layers that
    have it; otherwise all have it.
    """

    window: int | None
    needs_flag: bool = False
    by_layer: bool = False


def read_sliding_windows(
    config: JsonObject, defaults: WindowDefaults | None, *, layers: int, max_sequence: int
) -> SlidingWindows:
    """Return the window of each of ``layers`` layers; without ``defaults``, the architecture has no windows.

    A window that no sequence of ``max_sequence`` tokens exceeds is full attention, None. Raises ``ModelError`` for
    settings that are malformed or contradict each other.
    """
    if defaults is None:
        return (None,) * layers
    window = _read_window(config, defaults)
    first = 0 if window is not None else layers
    if defaults.by_layer and window is not None:
        first = _read_first_layer(config)
    kinds = [FULL if layer < first else SLIDING for layer in range(layers)]
    named = _read_layer_types(config, layers)
    if named is not None and defaults.by_layer:
        kinds = named
    elif named is not None and named != kinds:
        raise ModelError(
            f"{config.source}: this architecture has the same attention in all layers, by 'sliding_window'; remove "
            "'layer_types'"
        )
    if window is None and SLIDING in kinds:
        raise ModelError(
            f"{config.source}: 'layer_types' names {SLIDING!r}, but no window is enabled by 'sliding_window' and "
            "'use_sliding_window'"
        )
    if window is None or window >= max_sequence:
        return (None,) * layers
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _read_window(config: JsonObject, defaults: WindowDefaults) -> int | None:
    """Return the window of the layers that have one. A null is no window, unlike an absent key."""
    if defaults.needs_flag and not config.flag("use_sliding_window"):
        return None
    if config.has("sliding_window"):
        return None if config.get("sliding_window") is None else config.positive("sliding_window")
    return defaults.window


def _read_first_layer(config: JsonObject) -> int:
    first = config.get("max_window_layers")
    if first is None:
        return MAX_WINDOW_LAYERS
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise ModelError(f"{config.source}: 'max_window_layers' must be a whole number, not {first!r}")
    return first


def _read_layer_types(config: JsonObject, layers: int) -> list[str] | None:
    """Return the kind of attention of each layer, if the configuration names them."""
    kinds = config.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise ModelError(f"{config.source}: 'layer_types' must be a list of {layers} kinds of attention")
    for kind in kinds:
        if kind not in (FULL, SLIDING):
            raise ModelError(
                f"{config.source}: layer type {kind!r} is not supported; supported are {FULL}, {SLIDING}"
            )
    return kinds
