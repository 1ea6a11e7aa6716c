"""What a ``config.json`` says of quantized weights; no torch.

Served is e4m3 with one scale for each output, whose activations are rounded token by token as they come. Checkpoints
of it are written by compressed-tensors (its float-quantized format) and by FBGEMM, which bounds activations besides.
"""

from typing import Any, Final

from skiff_runtime.config import Quantization
from skiff_runtime.errors import ModelError
from skiff_runtime.json_file import Fields
from skiff_runtime.layers.projections import UnquantizedProjections
from skiff_runtime.models.left_out import find_unquantized_projections

_COMPRESSED: Final = "compressed-tensors"
_FBGEMM: Final = "fbgemm_fp8"
_BOUND: Final = "activation_scale_ub"
_DEFAULT_BOUND: Final = 1200.0
"""Of FBGEMM's checkpoints that do not say, in transformers."""
_WEIGHTS: Final = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
_ACTIVATIONS: Final = {
    "num_bits": 8,
    "type": "float",
    "strategy": "token",
    "symmetric": True,
    "dynamic": True,
}


def read_quantization(config: Fields) -> Quantization:
    """How the checkpoint's matrices are kept. Raises ``ModelError`` for what is not served, naming it."""
    told = config.object("quantization_config")
    if told is None:
        return "none"
    method = told.text("quant_method", "unknown")
    if method == _COMPRESSED:
        _check_groups(told)
    elif method != _FBGEMM:
        _refuse(told, f"is by the method {method!r}")
    return "fp8"


def read_unquantized_projections(config: Fields, layers: int) -> UnquantizedProjections:
    """Products of ``layers`` decoder layers that a quantized checkpoint leaves out. Raises ``ModelError``."""
    told = config.object("quantization_config")
    if told is None:
        return ()
    key = "modules_to_not_convert" if told.get("quant_method") == _FBGEMM else "ignore"
    return find_unquantized_projections(f"{told.source}: {key!r}", told.get(key) or [], layers)


def read_activation_scale_ub(config: Fields) -> float | None:
    """Where activations are cut before they are rounded, if anywhere. Raises ``ModelError`` for what is no bound.

    FBGEMM computes the scale of a token from its largest number or the bound, whichever is less, and makes what then is
    beyond e4m3 the largest there. A null is no bound.
    """
    told = config.object("quantization_config")
    if told is None or told.get("quant_method") != _FBGEMM:
        return None
    if told.has(_BOUND) and told.get(_BOUND) is None:
        return None
    bound = told.number(_BOUND, _DEFAULT_BOUND)
    if bound <= 0:
        raise ModelError(f"{told.source}: {_BOUND!r} must be more than 0, not {bound:g}")
    return bound


def _check_groups(told: Fields) -> None:
    if told.get("kv_cache_scheme") is not None:
        _refuse(told, "has scales for the KV cache ('kv_cache_scheme')")
    groups = told.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        _refuse(told, "has not exactly one of 'config_groups'")
        return
    [group] = groups.values()
    if not isinstance(group, dict) or group.get("targets") != ["Linear"]:
        _refuse(told, "does not target all linear layers")
    for name, wanted in (("weights", _WEIGHTS), ("input_activations", _ACTIVATIONS)):
        _check_scheme(told, name, group.get(name), wanted)


def _check_scheme(told: Fields, name: str, scheme: Any, wanted: dict[str, Any]) -> None:
    given = scheme if isinstance(scheme, dict) else {}
    for key, value in wanted.items():
        if given.get(key) != value:
            _refuse(told, f"has {key!r} of {name} {given.get(key)!r}")


def _refuse(told: Fields, what: str) -> None:
    raise ModelError(
        f"{told.source}: the weights' quantization {what}, which is not supported; served are unquantized weights "
        "(with --quantization fp8 if wanted) and e4m3 with one scale for each output and each token"
    )
