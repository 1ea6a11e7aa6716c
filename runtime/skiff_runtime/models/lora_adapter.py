"""The files of a LoRA adapter as peft writes them: ``adapter_config.json`` and ``adapter_model.safetensors``.

Neither is trusted. Everything that would change the computation in a way that is not served is refused here, by name, and
each tensor is compared with the model before it is read.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from skiff_runtime import log
from skiff_runtime.errors import ModelError
from skiff_runtime.hub.repository import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from skiff_runtime.json_file import JsonObject, read_json
from skiff_runtime.kernels.lora_slots import (
    MAX_DATA_BYTES,
    HostBuffer,
    SlotEntry,
    allocate_host_buffer,
    make_host_buffer,
)
from skiff_runtime.layers.lora import LoraLayer, LoraModule
from skiff_runtime.layers.projections import PACKED_MODULES
from skiff_runtime.models.tensor_file import StoredTensor, TensorFile

PREFIX: Final = "base_model.model."
MAX_STATED_RANK: Final = 1 << 16
MAX_TENSORS: Final = 768
"""Tensors in one buffer; the first one also has up to ten entries for each decoder layer."""
MAX_CONFIG_BYTES: Final = 1 << 20
MAX_HEADER_BYTES: Final = 1 << 24
"""Bound on the header of an adapter's safetensors file, which lists its tensors. It is parsed in the rank's process while steps
run. An adapter of all experts of Qwen3-30B-A3B has some 6 MB, and is refused by a message of its own."""
MAX_PATTERNS: Final = 4096
"""Each module is compared with all entries of a pattern, by a thread that competes with the planning of steps."""
_MAX_FLOAT32: Final = torch.finfo(torch.float32).max
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
    config = JsonObject(str(file), read_json(file, max_bytes=MAX_CONFIG_BYTES))
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
) -> list[HostBuffer]:
    """Read the adapter in the directory ``path`` for the model with these ``layers``: what makes a LoRA slot hold it.

    A base model that is none of ``base_names`` is a warning, because a model has many names. Raises ``ModelError`` with one
    message that names the file and what is wrong.
    """
    config = read_adapter_config(path)
    if config.base_model and Path(config.base_model).name not in base_names:
        log.warning("adapter_base_differs", adapter=str(path), base=config.base_model)
    modules = {
        f"{prefix}{module.name}": _PlacedModule(module, layer, part)
        for prefix, layer in layers
        for part, module in enumerate(layer.modules)
    }
    if not (path / ADAPTER_WEIGHTS).is_file():
        raise ModelError(
            f"{path} lacks {ADAPTER_WEIGHTS}; save the adapter with save_pretrained, as safetensors"
        )
    file = TensorFile(path / ADAPTER_WEIGHTS, max_header_bytes=MAX_HEADER_BYTES)
    try:
        matrices = _check_tensors(file, config, modules, max_rank)
        clearing = _clear_rest(matrices.values(), config, layers)
        return _read_buffers(file, config, matrices, list(clearing), layers[0][1].weights.a)
    finally:
        file.close()


class _PlacedModule(NamedTuple):
    """A module of the model, and the part of a layer that it is."""

    module: LoraModule
    layer: LoraLayer
    part: int


class _Matrix(NamedTuple):
    """A tensor's meaning: ``kind`` is "A" or "B", and ``name`` that of the module."""

    name: str
    kind: str
    placed: _PlacedModule


def _check_tensors(
    file: TensorFile, config: AdapterConfig, modules: Mapping[str, _PlacedModule], max_rank: int
) -> dict[str, _Matrix]:
    """Return the meaning of each tensor of a file, by its name.

    Raises:
        ModelError: A tensor does not belong to the model's ``modules``, one of a pair is missing, or one is not as it must be.
    """
    meanings: dict[str, _Matrix] = {}
    found: dict[str, dict[str, StoredTensor]] = {}
    for name, stored in file.tensors.items():
        module, matrix = _parse_name(name)
        if module not in modules:
            raise ModelError(f"{file.path}: {_describe_refusal(name)}")
        matrices = found.setdefault(module, {})
        if matrix in matrices:
            raise ModelError(f"{file.path} contains lora_{matrix} of {module!r} twice")
        matrices[matrix] = stored
        meanings[name] = _Matrix(module, matrix, modules[module])
    if not found:
        raise ModelError(f"{file.path} contains no tensor")
    for module, matrices in found.items():
        _check_pair(file.path, module, matrices, config, modules[module].module, max_rank)
    return meanings


def _parse_name(name: str) -> tuple[str, str]:
    """Return the module and the matrix, "A" or "B", of a tensor; "" for one with another name."""
    match = _TENSOR.fullmatch(name.removeprefix(PREFIX))
    return ("", "") if match is None else (match["module"], match["matrix"])


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


def _read_buffers(
    file: TensorFile,
    config: AdapterConfig,
    matrices: Mapping[str, _Matrix],
    entries: list[SlotEntry],
    slots: torch.Tensor,
) -> list[HostBuffer]:
    """Read checked tensors as they lie in the file, in few buffers, with the entries that fill a slot with them.

    ``entries``: others, for the first buffer. ``slots``: any matrices of the slots, for their type and device.

    Nothing is done tensor by tensor but to write down numbers: this thread competes with the one that plans steps for
    Python's lock, and each operation of PyTorch gives it up and waits for it again.
    """
    buffers, limit = [], torch.finfo(slots.dtype).max
    for run in _find_runs(file):
        first = run[0][1]
        size = run[-1][1].end - first.offset
        data = allocate_host_buffer(size, slots.device)
        file.read(data[:size].numpy().data, first.offset)
        low, high = data[:size].view(DTYPES[first.dtype]).aminmax()
        bound = max(float(high), -float(low))  # both are NaN if one value is
        for name, stored in run:
            matrix, offset = matrices[name], stored.offset - first.offset
            entry = _make_entry(matrix, stored, offset, config)
            # The bound is that of all tensors of the run, so it is only the first look. It never holds for NaN. In
            # float32, which fills the slot, the scale may be infinite.
            scale = abs(entry.value)
            if not (scale <= _MAX_FLOAT32 and bound * scale <= limit):
                values = data[offset : offset + stored.nbytes].view(DTYPES[stored.dtype]).float()
                if not bool((values * entry.value).to(slots.dtype).isfinite().all()):
                    raise ModelError(
                        f"{file.path}: lora_{matrix.kind} of {matrix.name!r} contains values that are not finite as "
                        f"{slots.dtype}"
                    )
            entries.append(entry)
        buffers.append(make_host_buffer(data, size, entries, slots.device))
        entries = []
    return buffers


def _make_entry(matrix: _Matrix, stored: StoredTensor, offset: int, config: AdapterConfig) -> SlotEntry:
    """Return the entry of a tensor that begins at ``offset`` of its buffer: of this rank's shard of it."""
    layer, part = matrix.placed.layer, matrix.placed.part
    rows, columns = stored.shape
    if matrix.kind == "A":
        target, scale = layer.a[part], 1.0
        columns = target.memory.shape[2]
    else:
        target, scale = layer.b[part], config.scale_of(matrix.name)
        rows = target.memory.shape[1]
    dtype, stride = DTYPES[stored.dtype], stored.shape[1]
    offset += (target.first_row * stride + target.first_column) * dtype.itemsize
    return SlotEntry(target.memory, rows, columns, scale, dtype, offset, stride)


def _clear_rest(
    matrices: Iterable[_Matrix], config: AdapterConfig, layers: Sequence[tuple[str, LoraLayer]]
) -> Iterator[SlotEntry]:
    """Yield the entries that set the ranks of all layers, and zeros where a module has a lower rank than its layer.

    What else is left in the slot of other adapters is finite, and not used beyond the layer's rank.
    """
    ranks: dict[LoraLayer, list[int]] = {layer: [0] * len(layer.modules) for _, layer in layers}
    for each in matrices:
        if each.kind == "A":  # one of each pair
            ranks[each.placed.layer][each.placed.part] = config.rank_of(each.name)
    for layer, parts in ranks.items():
        largest = max(parts)
        yield SlotEntry(layer.ranks, 1, 1, largest)
        for rank, a, b in zip(parts, layer.a, layer.b, strict=True):
            if rank < largest:
                yield SlotEntry(a.memory[:, rank:], largest - rank, a.memory.shape[2], 0.0)
                yield SlotEntry(b.memory[:, :, rank:], b.memory.shape[1], largest - rank, 0.0)


def _find_runs(file: TensorFile) -> Iterator[list[tuple[str, StoredTensor]]]:
    """Yield the tensors in their order in the file: neighbours of one type, as many as fit into a buffer, or a larger one."""
    run: list[tuple[str, StoredTensor]] = []
    for name, stored in file.tensors.items():
        if run:
            first = run[0][1]
            is_full = stored.end - first.offset > MAX_DATA_BYTES or len(run) == MAX_TENSORS
            if stored.dtype != first.dtype or is_full:
                yield run
                run = []
        run.append((name, stored))
    yield run


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
    if len(pattern.list_keys()) > MAX_PATTERNS:
        raise ModelError(f"{config.source}: {key!r} has more than {MAX_PATTERNS} entries")
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
