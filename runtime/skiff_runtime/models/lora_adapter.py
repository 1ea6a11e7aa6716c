"""The files of a LoRA adapter as peft writes them: ``adapter_config.json`` and ``adapter_model.safetensors``.

Neither is trusted. Everything that would change the computation in a way that is not served is refused here, by name, and
each tensor is compared with the model before it is read.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from skiff_runtime import log
from skiff_runtime.errors import ModelError
from skiff_runtime.hub.repository import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from skiff_runtime.json_file import JsonObject, read_json
from skiff_runtime.layers.lora import LoraLayer, LoraModule, LowRankPair, PackedLora
from skiff_runtime.layers.projections import PACKED_MODULES
from skiff_runtime.models.tensor_file import StoredTensor, TensorFile

PREFIX: Final = "base_model.model."
MAX_STATED_RANK: Final = 1 << 16
DTYPES: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
MODULES: Final = tuple(name.rpartition(".")[2] for names in PACKED_MODULES.values() for name in names)
_UNSUPPORTED: Final = (
    "use_dora",
    "lora_bias",
    "fan_in_fan_out",
    "modules_to_save",
    "trainable_token_indices",
    "layer_replication",
    "target_parameters",
    "use_qalora",
    "use_bdlora",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
    "velora_config",
)
"""Fields of peft's ``LoraConfig`` that change the computation when they are set."""
_RESIDUAL_INITS: Final = ("pissa", "olora", "corda", "lora_ga", "loftq")
"""Values of ``init_lora_weights``, or their beginnings, with which peft changes the base weights as well."""
_PLAIN_PATTERN: Final = re.compile(r"\^?[A-Za-z0-9_.]+")
_TENSOR: Final = re.compile(r"(?P<module>.+)\.lora_(?P<matrix>[AB])\.weight")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The fields of ``adapter_config.json`` that are served. The patterns map modules' names to other ranks and alphas."""

    rank: int
    alpha: float
    use_rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    base_model: str

    def rank_of(self, module: str) -> int:
        """Return the rank of a module's matrices."""
        key = _find_pattern(self.rank_pattern, module)
        return self.rank if key is None else self.rank_pattern[key]

    def scale_of(self, module: str) -> float:
        """Return the factor of a module's product: alpha / r, with rsLoRA (Kalajdzievski, 2023) alpha / sqrt(r)."""
        key, rank = _find_pattern(self.alpha_pattern, module), self.rank_of(module)
        alpha = self.alpha if key is None else self.alpha_pattern[key]
        return alpha / (rank**0.5 if self.use_rslora else rank)


def read_adapter_config(path: Path) -> AdapterConfig:
    """Read and check the configuration in the directory ``path``. Raises ``ModelError`` that names the file and the key."""
    file = path / ADAPTER_CONFIG
    config = JsonObject(str(file), read_json(file))
    kind = config.text("peft_type", "")
    if kind != "LORA":
        raise ModelError(f"{file}: 'peft_type' is {kind!r}; only LORA adapters are served")
    for key in _UNSUPPORTED:
        if config.get(key):
            raise ModelError(f"{file}: {key!r} is set, which is not supported")
    if config.text("bias", "none") != "none":
        raise ModelError(f"{file}: 'bias' is {config.get('bias')!r}, but trained biases are not supported")
    initial = config.get("init_lora_weights")
    if isinstance(initial, str) and initial.lower().startswith(_RESIDUAL_INITS):
        raise ModelError(
            f"{file}: 'init_lora_weights' is {initial!r}, which changes the base weights, too; save the adapter with "
            "peft's path_initial_model_for_weight_conversion"
        )
    _check_targets(config)
    ranks, alphas = _read_pattern(config, "rank_pattern"), _read_pattern(config, "alpha_pattern")
    return AdapterConfig(
        rank=config.positive("r", limit=MAX_STATED_RANK),
        alpha=config.number("lora_alpha"),
        use_rslora=config.flag("use_rslora"),
        rank_pattern={key: ranks.positive(key, limit=MAX_STATED_RANK) for key in ranks.list_keys()},
        alpha_pattern={key: alphas.number(key) for key in alphas.list_keys()},
        base_model=config.text("base_model_name_or_path", ""),
    )


def read_adapter(
    path: Path, layers: Sequence[tuple[str, LoraLayer]], *, max_rank: int, base_names: Iterable[str]
) -> list[PackedLora | None]:
    """Read the adapter in the directory ``path`` for the model with these ``layers``; the result is parallel to them.

    A base model that is none of ``base_names`` is a warning, because a model has many names. Raises ``ModelError`` with one
    message that names the file and what is wrong.
    """
    config = read_adapter_config(path)
    if config.base_model and Path(config.base_model).name not in base_names:
        log.warning("adapter_base_differs", adapter=str(path), base=config.base_model)
    modules = {f"{prefix}{module.name}": module for prefix, layer in layers for module in layer.modules}
    if not (path / ADAPTER_WEIGHTS).is_file():
        raise ModelError(
            f"{path} lacks {ADAPTER_WEIGHTS}; save the adapter with save_pretrained, as safetensors"
        )
    file = TensorFile(path / ADAPTER_WEIGHTS)
    try:
        pairs = _read_pairs(file, config, modules, max_rank)
    finally:
        file.close()
    packed = []
    for prefix, layer in layers:
        names = {module.name: f"{prefix}{module.name}" for module in layer.modules}
        packed.append(layer.pack({name: pairs[full] for name, full in names.items() if full in pairs}))
    return packed


def _read_pairs(
    file: TensorFile, config: AdapterConfig, modules: Mapping[str, LoraModule], max_rank: int
) -> dict[str, LowRankPair]:
    """Check all tensors of a file against the model's ``modules``, and then read them."""
    found: dict[str, dict[str, StoredTensor]] = {}
    for name, stored in file.tensors.items():
        match = _TENSOR.fullmatch(name.removeprefix(PREFIX))
        if match is None or match["module"] not in modules:
            raise ModelError(f"{file.path}: {_describe_refusal(name)}")
        found.setdefault(match["module"], {})[match["matrix"]] = stored
    if not found:
        raise ModelError(f"{file.path} contains no tensor")
    for module, matrices in found.items():
        _check_pair(file.path, module, matrices, config, modules[module], max_rank)
    return {module: _read_pair(file, module, found[module], config.scale_of(module)) for module in found}


def _check_pair(
    path: Path,
    name: str,
    matrices: Mapping[str, StoredTensor],
    config: AdapterConfig,
    module: LoraModule,
    max_rank: int,
) -> None:
    rank = config.rank_of(name)
    if rank > max_rank:
        raise ModelError(f"{path}: {name!r} has rank {rank}, but --max-lora-rank is {max_rank}")
    for matrix, shape in (("A", (rank, module.inputs)), ("B", (module.outputs, rank))):
        stored = matrices.get(matrix)
        if stored is None:
            raise ModelError(f"{path} lacks the matrix lora_{matrix} of {name!r}")
        if stored.shape != shape:
            raise ModelError(
                f"{path}: lora_{matrix} of {name!r} has shape {list(stored.shape)}, but this model and rank {rank} need "
                f"{list(shape)}"
            )
        if stored.dtype not in DTYPES:
            raise ModelError(
                f"{path}: lora_{matrix} of {name!r} is of type {stored.dtype}; use {', '.join(DTYPES)}"
            )


def _read_pair(
    file: TensorFile, name: str, matrices: Mapping[str, StoredTensor], scale: float
) -> LowRankPair:
    a, b = (_read_tensor(file, matrices[matrix]) for matrix in ("A", "B"))
    pair = LowRankPair(a, b * scale)
    if not all(bool(torch.isfinite(each).all()) for each in pair):
        raise ModelError(f"{file.path}: the matrices of {name!r} contain values that are not finite")
    return pair


def _read_tensor(file: TensorFile, stored: StoredTensor) -> torch.Tensor:
    """Return a tensor in float32."""
    values = torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
    file.read(values.view(-1).view(torch.uint8).numpy().data, stored.offset)
    return values.float()


def _check_targets(config: JsonObject) -> None:
    """Raise ``ModelError`` for a list of target modules with one that is not served; the tensors' names decide about others."""
    targets = config.get("target_modules")
    if not isinstance(targets, list):  # a regular expression
        return
    for target in targets:
        if str(target).rpartition(".")[2] not in MODULES:
            raise ModelError(
                f"{config.source}: 'target_modules' contains {target!r}, but adapters are served for {', '.join(MODULES)}"
            )


def _read_pattern(config: JsonObject, key: str) -> JsonObject:
    """Return a pattern, whose keys must be names: a regular expression of a stranger could run for ever."""
    pattern = config.object(key) or JsonObject(f"{config.source}: {key}", {})
    for each in pattern.list_keys():
        if _PLAIN_PATTERN.fullmatch(each) is None:
            raise ModelError(
                f"{config.source}: {key!r} contains the regular expression {each!r}; only modules' names are supported"
            )
    return pattern


def _find_pattern(pattern: Mapping[str, Any], module: str) -> str | None:
    """Return the first key that is the module's name or, without ``^``, its end after a dot; as peft does."""
    for key in pattern:
        name = key.removeprefix("^")
        if module == name or (name == key and module.endswith(f".{name}")):
            return key
    return None


def _describe_refusal(name: str) -> str:
    if "lm_head" in name or "embed_tokens" in name:
        return f"{name!r} adapts the embedding or the output head, which is not supported"
    if ".experts." in name:
        return f"{name!r} adapts experts, which is not supported"
    if "lora_magnitude_vector" in name:
        return f"{name!r} belongs to DoRA, which is not supported"
    return f"{name!r} is no LoRA matrix of a module of this model"
