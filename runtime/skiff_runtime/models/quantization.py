"""Quantization of a checkpoint, as its ``config.json`` declares it; imports no torch.

Supported methods, by ``quant_method``:

- ``fp8``: FP8 (e4m3) with one scale for each block of 128 x 128 weights, as Qwen and DeepSeek publish it, or with one
  for each matrix. Activations are quantized for each token and 128 inputs; with one scale for each matrix, per token or
  by a scale of the checkpoint.
- ``fbgemm_fp8``: FP8 with one scale for each output, and for each token; the scale of activations is bounded.
- ``compressed-tensors``: FP8 in each of these ways, or packed 4-bit integers in groups of inputs.
- ``awq`` and ``gptq``: 4-bit integers in groups of inputs.

All of them list the modules that stay unquantized, by the rules of ``ModuleNames``. A key that is
neither read here nor known to change nothing is refused by its name.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from skiff_runtime.config import Quantization
from skiff_runtime.errors import ModelError
from skiff_runtime.json_file import JsonObject
from skiff_runtime.kernels.constants import FP8_BLOCK
from skiff_runtime.layers.moe_config import MoeConfig
from skiff_runtime.layers.projections import UnquantizedProjections, packed_modules
from skiff_runtime.layers.weight_format import GROUP_SIZES, Fp8Format, Int4Format, WeightFormat

_COMPRESSED: Final = "compressed-tensors"
_FBGEMM: Final = "fbgemm_fp8"
_SCALE_UB: Final = "activation_scale_ub"
_DEFAULT_SCALE_UB: Final = 1200.0
"""Bound of an FBGEMM checkpoint that names none, as in transformers."""
_MODULE_LISTS: Final[dict[Quantization, tuple[str, ...]]] = {
    "fp8": ("modules_to_not_convert", "ignored_layers"),
    "fbgemm_fp8": ("modules_to_not_convert",),
    "compressed-tensors": ("ignore",),
    "awq": ("modules_to_not_convert",),
    "gptq": ("modules_to_not_convert",),
}
"""Keys of the modules that stay unquantized; the first that is there counts."""
_READ_KEYS: Final[dict[Quantization, tuple[str, ...]]] = {
    "fp8": (
        "activation_scheme",
        "scale_fmt",
        "fmt",
        "modules_to_convert",
        "weight_block_size",
        "kv_cache_quant_targets",
        "expert_dtype",
    ),
    "fbgemm_fp8": (_SCALE_UB,),
    "compressed-tensors": (
        "config_groups",
        "format",
        "kv_cache_scheme",
        "transform_config",
        "sparsity_config",
    ),
    "awq": ("bits", "group_size", "version", "format", "zero_point", "desc_act"),
    "gptq": (
        "bits",
        "group_size",
        "checkpoint_format",
        "format",
        "pack_dtype",
        "lm_head",
        "dynamic",
        "modules_in_block_to_quantize",
        "sym",
        "desc_act",
        "static_groups",
        "is_marlin_format",
    ),
}
"""Keys of ``quantization_config`` that are read here, besides the method and the lists of modules."""
_CALIBRATION_KEYS: Final = (
    "act_group_aware",
    "amp",
    "autoround_version",
    "backend",
    "batch_size",
    "block_name_to_quantize",
    "cache_block_outputs",
    "damp_auto_increment",
    "damp_percent",
    "dataset",
    "disable_exllama",
    "do_fuse",
    "enable_minmax_tuning",
    "enable_norm_bias_tuning",
    "enable_quanted_input",
    "exllama_config",
    "fuse_max_seq_len",
    "gradient_accumulate_steps",
    "iters",
    "low_gpu_mem_usage",
    "lr",
    "max_input_length",
    "meta",
    "minmax_lr",
    "model_file_base_name",
    "model_name_or_path",
    "model_seqlen",
    "module_name_preceding_first_block",
    "modules_to_fuse",
    "mse",
    "nsamples",
    "pad_token_id",
    "provider",
    "quantizer",
    "seqlen",
    "tokenizer",
    "train_bs",
    "true_sequential",
    "use_cuda_fp16",
    "use_exllama",
)
_IGNORED_KEYS: Final[dict[Quantization, tuple[str, ...]]] = {
    "fp8": ("dequantize",),
    "fbgemm_fp8": ("dequantize",),
    "compressed-tensors": (
        "dequantize",
        "global_compression_ratio",
        "quantization_status",
        "run_compressed",
        "use_optimized_inference",
        "version",
    ),
    "awq": (*_CALIBRATION_KEYS, "sym"),
    "gptq": _CALIBRATION_KEYS,
}
"""Keys that change no computation: how the weights were found, and which kernels another library takes. transformers
writes ``sym`` to AWQ's settings as well, where ``zero_point`` counts."""
_GROUP_KEYS: Final = ("targets", "weights", "input_activations", "output_activations", "format")
_SCHEME_KEYS: Final = (
    "num_bits",
    "type",
    "symmetric",
    "group_size",
    "strategy",
    "block_structure",
    "dynamic",
    "actorder",
    "observer",
    "observer_kwargs",
    "scale_dtype",
    "zp_dtype",
)
"""Keys of compressed-tensors. Observers belong to calibration; the dtypes are those of stored tensors, which are
checked as they are loaded."""
_FP8: Final = {"num_bits": 8, "type": "float", "symmetric": True}
_INT4: Final = {"num_bits": 4, "type": "int"}
_ALL_INPUTS: Final = -1
"""The group size by which AutoAWQ and GPTQ name groups of all inputs."""
_EXPRESSION_PREFIX: Final = "re:"
_PLAIN_NAME: Final = re.compile(r"[\w.]+")
_MAX_EXPRESSIONS: Final = 64
"""Each expression is tried on every module; a list of plain names may be of any length."""
_MAX_NAME: Final = 1 << 10
"""Characters of a name or an expression."""


@dataclass(frozen=True, slots=True)
class CheckpointQuantization:
    """The quantization of a checkpoint's matrices: the method, the format, and what stays unquantized."""

    method: Quantization
    weight_format: WeightFormat | None
    excluded: "ModuleNames"


def read_quantization(config: JsonObject) -> CheckpointQuantization:
    """Return the quantization of the checkpoint's matrices. Raises ``ModelError`` for an unsupported one."""
    settings = config.object("quantization_config")
    if settings is None:
        return CheckpointQuantization("none", None, ModuleNames(config.source, [], "none"))
    named = settings.text("quant_method", "unknown")
    method = next((each for each in _READERS if each == named), None)
    if method is None:
        _refuse(settings, f"is by the method {named!r}")
    known = ("quant_method", *_MODULE_LISTS[method], *_READ_KEYS[method], *_IGNORED_KEYS[method])
    _check_keys(settings, "", {key: settings.get(key) for key in settings.list_keys()}, known)
    weight_format = _READERS[method](settings)
    key = next((key for key in _MODULE_LISTS[method] if settings.get(key)), _MODULE_LISTS[method][0])
    excluded = ModuleNames(f"{settings.source}: {key!r}", settings.get(key) or [], method)
    return CheckpointQuantization(method, weight_format, excluded)


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
    quantization: CheckpointQuantization, layers: int, moe: MoeConfig | None = None
) -> UnquantizedProjections:
    """Find the projections of ``layers`` decoder layers that stay unquantized.

    Other modules, such as ``lm_head`` and routers, are ignored: they are in the model's dtype in any case.

    Raises ``ModelError`` if only some of the modules that one projection packs are excluded.
    """
    excluded = quantization.excluded
    if excluded.is_empty:
        return ()
    found = []
    for layer in range(layers):
        for projections, modules in packed_modules(layer, moe):
            paths = [f"model.layers.{layer}.{module}" for module in modules]
            unquantized = [path for path in paths if path in excluded]
            if unquantized and len(unquantized) < len(paths):
                quantized = next(path for path in paths if path not in unquantized)
                raise ModelError(
                    f"{excluded.source} excludes {unquantized[0]!r} but not {quantized!r}, which is not supported: "
                    + (
                        "one matrix packs both"
                        if len(projections) == 1
                        else "all experts are computed together"
                    )
                )
            if unquantized:
                found += [(layer, projection) for projection in projections]
    return tuple(found)


def check_expert_format(
    quantization: CheckpointQuantization, unquantized: UnquantizedProjections, moe: MoeConfig, layers: int
) -> None:
    """Raise ``ModelError`` if any of ``layers`` layers has experts in a format that they do not support."""
    weight_format = quantization.weight_format
    sparse = [layer for layer in range(layers) if layer not in moe.dense_layers]
    if weight_format is None or all((layer, "gate_up_proj") in unquantized for layer in sparse):
        return
    if quantization.method == _FBGEMM:
        problem = f"by the method {_FBGEMM!r}, whose bound of activations they do not apply"
    elif isinstance(weight_format, Int4Format):
        problem = "in 4-bit integers"
    elif weight_format.activations == "static":
        problem = "in FP8 with activations by a scale of the checkpoint"
    elif weight_format.scales == "tensor":
        problem = "in FP8 with one scale per matrix"
    else:
        return
    raise ModelError(
        f"{quantization.excluded.source.rpartition(':')[0]}: the quantization of the experts is {problem}, which is not "
        "supported; supported are unquantized experts (quantized at load by --quantization fp8) and FP8 with one scale "
        "per output or per 128 x 128 block"
    )


class ModuleNames:
    """A set of modules, given by names and regular expressions. ``source`` names their list in messages.

    AutoAWQ's names cover each path that contains them. In lists of all other methods, a name covers the module with
    this path, those inside of it, and those whose paths end with its components; the text after ``re:`` is an
    expression that the beginning of a path must match, as in compressed-tensors; any other text is an expression that
    a path must match up to the end of a component, as in transformers.
    """

    def __init__(self, source: str, names: Any, method: Quantization) -> None:
        self.source = source
        self._method = method
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ModelError(f"{source} must be a list of modules, not {names!r}")
        if any(not name or len(name) > _MAX_NAME for name in names):
            raise ModelError(f"{source} must list names of 1 to {_MAX_NAME} characters")
        if method == "awq":
            self._plain = frozenset(names)
        else:
            self._plain = frozenset(name for name in names if _PLAIN_NAME.fullmatch(name))
        others = [name for name in names if name not in self._plain]
        if len(others) > _MAX_EXPRESSIONS:
            raise ModelError(
                f"{source} has {len(others)} regular expressions; at most {_MAX_EXPRESSIONS} are read"
            )
        self._expressions = [_compile(source, name) for name in others]

    @property
    def is_empty(self) -> bool:
        """Return whether no module is excluded."""
        return not self._plain and not self._expressions

    def __contains__(self, path: str) -> bool:
        """Return whether a name or an expression covers the module."""
        if self._method == "awq":
            return any(name in path for name in self._plain)
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


def _read_fp8(settings: JsonObject) -> WeightFormat:
    """Read FP8 as Qwen and DeepSeek publish it in blocks, and as AutoFP8 writes it with one scale for each matrix."""
    scheme = settings.text("activation_scheme", "dynamic").lower()
    if scheme not in ("dynamic", "static"):
        _refuse(settings, f"has 'activation_scheme' {scheme!r}")
    for key, supported in (("scale_fmt", "float"), ("fmt", "e4m3")):
        if settings.get(key) not in (None, supported):
            _refuse(settings, f"has {key!r} {settings.get(key)!r}")
    if settings.get("kv_cache_quant_targets"):
        _refuse(settings, "has scales for the KV cache ('kv_cache_quant_targets')")
    if settings.get("expert_dtype") not in (None, "fp8"):
        _refuse(settings, f"has 'expert_dtype' {settings.get('expert_dtype')!r}")
    if settings.get("modules_to_convert"):
        _refuse(settings, "covers more than linear layers ('modules_to_convert')")
    block = settings.get("weight_block_size")
    if block is None:
        return Fp8Format("tensor", "static" if scheme == "static" else "token")
    if block != [FP8_BLOCK, FP8_BLOCK]:
        _refuse(settings, f"has 'weight_block_size' {block!r}")
    if scheme == "static":
        _refuse(settings, "has blocks of weights and 'activation_scheme' 'static'")
    return Fp8Format("block", "group")


def _read_fbgemm(_settings: JsonObject) -> WeightFormat:
    return Fp8Format("channel", "token")


def _read_compressed(settings: JsonObject) -> WeightFormat:
    """Read the only group of a compressed-tensors checkpoint."""
    if settings.get("kv_cache_scheme") is not None:
        _refuse(settings, "has scales for the KV cache ('kv_cache_scheme')")
    if settings.get("transform_config"):
        _refuse(settings, "has online transforms ('transform_config')")
    sparsity = settings.get("sparsity_config")
    if sparsity and (not isinstance(sparsity, dict) or sparsity.get("format") != "dense"):
        _refuse(settings, "has sparse weights ('sparsity_config')")
    groups = settings.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        _refuse(settings, "has not exactly one of 'config_groups'")
    [group] = groups.values()
    if not isinstance(group, dict) or group.get("targets") != ["Linear"]:
        _refuse(settings, "does not target all linear layers")
    _check_keys(settings, " of a group", group, _GROUP_KEYS)
    if group.get("output_activations") is not None:
        _refuse(settings, "has quantized results of layers ('output_activations')")
    if group.get("format") not in (None, settings.get("format")):
        _refuse(settings, f"has 'format' {group.get('format')!r} of a group")
    weights = group.get("weights")
    weights = weights if isinstance(weights, dict) else {}
    _check_keys(settings, " of weights", weights, _SCHEME_KEYS)
    if isinstance(group.get("input_activations"), dict):
        _check_keys(settings, " of input_activations", group["input_activations"], _SCHEME_KEYS)
    order = weights.get("actorder")
    if order is not None and order is not False and order not in ("weight", "static"):
        _refuse(settings, f"has 'actorder' of weights {order!r}")
    if weights.get("type") == "int":
        return _read_compressed_int4(settings, weights, group.get("input_activations"))
    return _read_compressed_fp8(settings, weights, group.get("input_activations"))


def _read_compressed_fp8(settings: JsonObject, weights: dict[str, Any], activations: Any) -> WeightFormat:
    _check_scheme(settings, "weights", weights, _FP8)
    activations = _check_scheme(settings, "input_activations", activations, _FP8)
    strategy, dynamic = weights.get("strategy"), activations.get("dynamic")
    if strategy == "block":
        _check_scheme(settings, "weights", weights, {"block_structure": [FP8_BLOCK, FP8_BLOCK]})
        grouped = {"strategy": "group", "group_size": FP8_BLOCK, "dynamic": True}
        _check_scheme(settings, "input_activations", activations, grouped)
        return Fp8Format("block", "group")
    if strategy not in ("channel", "tensor"):
        _refuse(settings, f"has 'strategy' of weights {strategy!r}")
    if dynamic is True:
        _check_scheme(settings, "input_activations", activations, {"strategy": "token"})
        return Fp8Format(strategy, "token")
    _check_scheme(settings, "input_activations", activations, {"strategy": "tensor", "dynamic": False})
    return Fp8Format(strategy, "static")


def _read_compressed_int4(settings: JsonObject, weights: dict[str, Any], activations: Any) -> WeightFormat:
    _check_scheme(settings, "weights", weights, _INT4)
    if activations is not None:
        _refuse(settings, "has integer weights and quantized activations ('input_activations')")
    if settings.get("format") != "pack-quantized":
        _refuse(settings, f"has 'format' {settings.get('format')!r}")
    strategy, size = weights.get("strategy"), weights.get("group_size")
    if strategy not in ("group", "channel"):
        _refuse(settings, f"has 'strategy' of weights {strategy!r}")
    group_size = None if strategy == "channel" else _check_group_size(settings, size)
    return Int4Format(_COMPRESSED, group_size, zero_points=weights.get("symmetric") is not True)


def _read_awq(settings: JsonObject) -> WeightFormat:
    _check_bits(settings)
    version = settings.text("version", settings.text("format", "gemm")).lower()
    if version != "gemm":
        _refuse(settings, f"has 'version' {version!r}")
    if not settings.flag("zero_point", True):
        _refuse(settings, "has 'zero_point' false")
    if settings.flag("desc_act"):
        _refuse(settings, "has 'desc_act' true")
    return Int4Format("awq", _read_group_size(settings), zero_points=True)


def _read_gptq(settings: JsonObject) -> WeightFormat:
    _check_bits(settings)
    stored = settings.text("checkpoint_format", settings.text("format", "gptq"))
    if stored not in ("gptq", "gptq_v2"):
        _refuse(settings, f"has 'checkpoint_format' {stored!r}")
    if settings.flag("is_marlin_format"):
        _refuse(settings, "has 'is_marlin_format' true")
    if settings.get("pack_dtype") not in (None, "int32"):
        _refuse(settings, f"has 'pack_dtype' {settings.get('pack_dtype')!r}")
    if settings.flag("lm_head"):
        _refuse(settings, "covers the output head ('lm_head')")
    for key in ("dynamic", "modules_in_block_to_quantize"):
        if settings.get(key):
            _refuse(settings, f"differs between modules ({key!r})")
    return Int4Format(
        "gptq",
        _read_group_size(settings),
        zero_points=not settings.flag("sym", True),
        activation_order=settings.flag("desc_act") and not settings.flag("static_groups"),
        zero_offset=1 if stored == "gptq" else 0,
    )


_READERS: Final[dict[Quantization, Callable[[JsonObject], WeightFormat]]] = {
    "fp8": _read_fp8,
    "fbgemm_fp8": _read_fbgemm,
    "compressed-tensors": _read_compressed,
    "awq": _read_awq,
    "gptq": _read_gptq,
}


def _check_bits(settings: JsonObject) -> None:
    if settings.get("bits") != 4:
        _refuse(settings, f"has 'bits' {settings.get('bits')!r}")


def _read_group_size(settings: JsonObject) -> int | None:
    size = settings.get("group_size")
    return None if size == _ALL_INPUTS else _check_group_size(settings, size)


def _check_group_size(settings: JsonObject, size: Any) -> int:
    if size not in GROUP_SIZES:
        _refuse(settings, f"has 'group_size' {size!r}")
    return int(size)


def _check_keys(settings: JsonObject, where: str, values: dict[str, Any], known: tuple[str, ...]) -> None:
    """Refuse the first key with a value that is not one of ``known``; null, false and empty ones say nothing."""
    for key, value in values.items():
        if value and key not in known:
            _refuse(settings, f"has the unknown setting {key!r}{where}")


def _check_scheme(settings: JsonObject, name: str, scheme: Any, supported: dict[str, Any]) -> dict[str, Any]:
    given = scheme if isinstance(scheme, dict) else {}
    for key, value in supported.items():
        if given.get(key) != value:
            _refuse(settings, f"has {key!r} of {name} {given.get(key)!r}")
    return given


def _refuse(settings: JsonObject, reason: str) -> NoReturn:
    raise ModelError(
        f"{settings.source}: the quantization of the weights {reason}, which is not supported; supported are "
        "unquantized weights (quantized at load by --quantization fp8), FP8 with one scale per output, per matrix or "
        "per 128 x 128 block, and 4-bit integers in groups of 32, 64 or 128 inputs or of all (compressed-tensors' "
        "pack-quantized, AWQ's gemm, GPTQ)"
    )
