"""Quantization of a checkpoint, as its ``config.json`` declares it; imports no torch.

Supported is FP8 (e4m3) with one scale per output of a matrix, whose activations are quantized token by token at run
time. Such checkpoints are written by compressed-tensors (its float-quantized format) and by FBGEMM, which also bounds
the scale of activations.

Both list the modules that stay unquantized: compressed-tensors takes a name as it is, and the text after ``re:`` as a
regular expression that the beginning of a module's path must match; transformers takes all names of an FBGEMM
checkpoint as regular expressions, each of which covers a module and all modules inside it.
"""

import re
from typing import Any, Final

from skiff_runtime.config import Quantization
from skiff_runtime.errors import ModelError
from skiff_runtime.json_file import JsonObject
from skiff_runtime.layers.moe_config import MoeConfig
from skiff_runtime.layers.projections import UnquantizedProjections, packed_modules

_COMPRESSED: Final = "compressed-tensors"
_FBGEMM: Final = "fbgemm_fp8"
_SCALE_UB: Final = "activation_scale_ub"
_DEFAULT_SCALE_UB: Final = 1200.0
"""Bound of an FBGEMM checkpoint that names none, as in transformers."""
_WEIGHTS: Final = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
_ACTIVATIONS: Final = {
    "num_bits": 8,
    "type": "float",
    "strategy": "token",
    "symmetric": True,
    "dynamic": True,
}
_EXPRESSION_PREFIX: Final = "re:"
_PLAIN_NAME: Final = re.compile(r"[\w.]+")
_MAX_EXPRESSIONS: Final = 64
"""Each expression is tried on every module; a list of plain names may be of any length."""


def read_quantization(config: JsonObject, moe: MoeConfig | None = None) -> Quantization:
    """Return the quantization of the checkpoint's matrices. Raises ``ModelError`` for an unsupported one."""
    settings = config.object("quantization_config")
    if settings is None:
        return "none"
    method = settings.text("quant_method", "unknown")
    if method == _COMPRESSED:
        _check_groups(settings)
    elif method != _FBGEMM:
        _refuse(settings, f"is by the method {method!r}")
    elif moe is not None:
        _refuse(
            settings, f"of experts is by the method {method!r}, whose bound of activations they do not apply"
        )
    return "fp8"


def read_unquantized_projections(
    config: JsonObject, layers: int, moe: MoeConfig | None = None
) -> UnquantizedProjections:
    """Return the projections of ``layers`` decoder layers that a quantized checkpoint keeps unquantized.

    Raises ``ModelError`` as ``find_unquantized_projections`` does.
    """
    settings = config.object("quantization_config")
    if settings is None:
        return ()
    key = "modules_to_not_convert" if settings.get("quant_method") == _FBGEMM else "ignore"
    return find_unquantized_projections(f"{settings.source}: {key!r}", settings.get(key) or [], layers, moe)


def read_activation_scale_ub(config: JsonObject) -> float | None:
    """Return the upper bound of an activation's magnitude, if the checkpoint has one.

    FBGEMM computes a token's scale from its largest magnitude or from the bound, whichever is less, and clamps what
    then exceeds FP8's range. A null is no bound. Raises ``ModelError`` for a bound that is not above 0.
    """
    settings = config.object("quantization_config")
    if settings is None or settings.get("quant_method") != _FBGEMM:
        return None
    if settings.has(_SCALE_UB) and settings.get(_SCALE_UB) is None:
        return None
    bound = settings.number(_SCALE_UB, _DEFAULT_SCALE_UB)
    if bound <= 0:
        raise ModelError(f"{settings.source}: {_SCALE_UB!r} must be more than 0, not {bound:g}")
    return bound


def find_unquantized_projections(
    source: str, names: Any, layers: int, moe: MoeConfig | None = None
) -> UnquantizedProjections:
    """Find the projections of ``layers`` decoder layers that ``names`` exclude.

    Other modules, such as ``lm_head`` and routers, are ignored: they are in the model's dtype in any case.

    Raises ``ModelError``, whose message begins with ``source``, if ``names`` is not a list of names, or if it excludes
    only some of the modules that one projection packs.
    """
    excluded = _ModuleNames(source, names)
    found = []
    for layer in range(layers):
        for projections, modules in packed_modules(layer, moe):
            paths = [f"model.layers.{layer}.{module}" for module in modules]
            unquantized = [path for path in paths if path in excluded]
            if unquantized and len(unquantized) < len(paths):
                quantized = next(path for path in paths if path not in unquantized)
                raise ModelError(
                    f"{source} excludes {unquantized[0]!r} but not {quantized!r}, which is not supported: "
                    + (
                        "one matrix packs both"
                        if len(projections) == 1
                        else "all experts are computed together"
                    )
                )
            if unquantized:
                found += [(layer, projection) for projection in projections]
    return tuple(found)


class _ModuleNames:
    """A set of modules, given by names and regular expressions."""

    def __init__(self, source: str, names: Any) -> None:
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ModelError(f"{source} must be a list of modules, not {names!r}")
        self._plain = frozenset(name for name in names if _PLAIN_NAME.fullmatch(name))
        others = [name for name in names if name not in self._plain]
        if len(others) > _MAX_EXPRESSIONS:
            raise ModelError(
                f"{source} has {len(others)} regular expressions; at most {_MAX_EXPRESSIONS} are read"
            )
        self._expressions = [_compile(source, name) for name in others]

    def __contains__(self, path: str) -> bool:
        """Return whether a name covers the module: its path, the path of a module around it, or the end of its path."""
        words = path.split(".")
        suffixes = (".".join(words[start:]) for start in range(len(words)))
        prefixes = (".".join(words[:stop]) for stop in range(1, len(words)))
        if any(name in self._plain for name in (*suffixes, *prefixes)):
            return True
        return any(expression.match(path) for expression in self._expressions)


def _compile(source: str, name: str) -> re.Pattern[str]:
    """Compile an expression to match from the beginning of a path; without ``re:``, up to the end of a path component."""
    expression = name.removeprefix(_EXPRESSION_PREFIX)
    try:
        return re.compile(expression if name != expression else rf"(?:{expression})(?:(?<=\.)|(?=\.|$))")
    except re.error as error:
        raise ModelError(f"{source}: {expression!r} is not a valid regular expression: {error}") from None


def _check_groups(settings: JsonObject) -> None:
    if settings.get("kv_cache_scheme") is not None:
        _refuse(settings, "has scales for the KV cache ('kv_cache_scheme')")
    groups = settings.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        _refuse(settings, "has not exactly one of 'config_groups'")
        return
    [group] = groups.values()
    if not isinstance(group, dict) or group.get("targets") != ["Linear"]:
        _refuse(settings, "does not target all linear layers")
    for name, supported in (("weights", _WEIGHTS), ("input_activations", _ACTIVATIONS)):
        _check_scheme(settings, name, group.get(name), supported)


def _check_scheme(settings: JsonObject, name: str, scheme: Any, supported: dict[str, Any]) -> None:
    given = scheme if isinstance(scheme, dict) else {}
    for key, value in supported.items():
        if given.get(key) != value:
            _refuse(settings, f"has {key!r} of {name} {given.get(key)!r}")


def _refuse(settings: JsonObject, reason: str) -> None:
    raise ModelError(
        f"{settings.source}: the quantization of the weights {reason}, which is not supported; supported are "
        "unquantized weights (quantized at load by --quantization fp8) and FP8 with one scale per output and per token"
    )
