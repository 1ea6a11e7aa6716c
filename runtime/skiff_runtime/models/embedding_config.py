"""The embeddings of a model, as its checkpoint describes them in the files of sentence-transformers; imports no torch.

``modules.json`` lists the stages behind the decoder: pooling, whose folder has a ``config.json``, and normalization.
``config_sentence_transformers.json`` has the prompts that go before a text. A model without these files has its last
token pooled, and its vectors normalized.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from skiff_runtime.errors import InvalidRequest, ModelError
from skiff_runtime.json_file import JsonObject, read_json, read_json_list
from skiff_runtime.messages import PoolingKind, PoolingSpec
from skiff_runtime.models.checkpoint_files import read_tensor_names

Vector = NDArray[np.float32]

MODULES_FILE: Final = "modules.json"
PROMPTS_FILE: Final = "config_sentence_transformers.json"
MAX_PROMPTS: Final = 256
MAX_PROMPT_CHARACTERS: Final = 16 << 10
_HEADLESS_SUFFIX: Final = "Model"
_CAUSAL_SUFFIX: Final = "ForCausalLM"
_MODES: Final = {"lasttoken": PoolingKind.LAST, "mean": PoolingKind.MEAN}
_MODE_FLAGS: Final = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""The older form of a pooling configuration: a flag for each mode. Several flags may be set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingConfig:
    """The computation of one vector from a text, and from the hidden states of its tokens.

    ``size`` is that of the vector. ``dimensions`` are the lengths to which a vector may be cut (Matryoshka), () for none
    and None for every one up to its size. ``prompts`` maps names to texts that precede an input; ``default_prompt`` is
    that of a request which names none. ``unsupported`` is the reason for which the files' own computation cannot be
    served, "" if it can.
    """

    size: int
    pooling: PoolingKind = PoolingKind.LAST
    normalize: bool = True
    dimensions: tuple[int, ...] | None = None
    prompts: tuple[tuple[str, str], ...] = ()
    default_prompt: str = ""
    unsupported: str = ""

    def with_pooling_type(self, pooling_type: str) -> "EmbeddingConfig":
        """Return the configuration under a value of ``--pooling-type``, which replaces the files' own pooling."""
        if pooling_type == "auto":
            return self
        return replace(self, pooling=PoolingKind(pooling_type), unsupported="")

    def make_pooling_spec(self) -> PoolingSpec:
        """Return the pooling of a request. Raises ``InvalidRequest`` if the model's own is not supported."""
        if self.unsupported:
            raise InvalidRequest(
                f"this model computes embeddings in a way that is not supported ({self.unsupported}); serve it with "
                "--pooling-type last or mean to compute them in another way"
            )
        return PoolingSpec(self.pooling)

    def add_prompt(self, text: str | list[int], name: str | None) -> str | list[int]:
        """Return an input behind the prompt ``name``, or behind the default one for None. Token ids take none.

        Raises ``InvalidRequest`` if there is no such prompt.
        """
        if isinstance(text, str) and name is None:
            return self.default_prompt + text
        prompts = dict(self.prompts)
        if name is not None and name not in prompts:
            known = ", ".join(map(repr, prompts))
            advice = (
                f"it has {known}" if known else "remove 'prompt_name', and write the prompt into the input"
            )
            raise InvalidRequest(f"the model has no prompt {name!r}; {advice}", param="prompt_name")
        if isinstance(text, str):
            assert name is not None
            return prompts[name] + text
        if name is not None:
            raise InvalidRequest(
                "'prompt_name' precedes texts; token ids take no prompt", param="prompt_name"
            )
        return text

    def check_dimensions(self, requested: int | None) -> int:
        """Return the size of vectors that are cut to ``requested`` numbers. Raises ``InvalidRequest``."""
        if requested is None or requested == self.size:
            return self.size
        allowed = self.dimensions
        if 1 <= requested < self.size and (allowed is None or requested in allowed):
            return requested
        if allowed is None:
            advice = f"the model's vectors have {self.size} numbers; request at most as many"
        elif allowed:
            advice = f"the model's vectors of {self.size} numbers can be cut to {', '.join(map(str, allowed))} only"
        else:
            advice = (
                f"the model's configuration says that its vectors of {self.size} numbers cannot be cut "
                "('is_matryoshka'); remove 'dimensions'"
            )
        raise InvalidRequest(f"'dimensions' is {requested}, but {advice}", param="dimensions")


def cut_vector(vector: Vector, size: int, *, normalize: bool) -> Vector:
    """Return the first ``size`` numbers of a vector, scaled to length 1 if ``normalize``; zeros stay zeros."""
    cut = vector[:size]
    length = float(np.linalg.norm(cut.astype(np.float64))) if normalize else 0.0
    return cut if length == 0.0 else (cut / length).astype(np.float32)


def causal_architecture(name: str) -> str:
    """Return the class with an output head whose decoder the class ``name`` is: Qwen3Model -> Qwen3ForCausalLM."""
    return name.removesuffix(_HEADLESS_SUFFIX) + _CAUSAL_SUFFIX if name.endswith(_HEADLESS_SUFFIX) else name


def is_headless(path: Path, config: JsonObject, named: str) -> bool:
    """Return whether a checkpoint of the class ``named`` has no output head, so that it can only embed.

    Files of sentence-transformers may lie beside a whole model, too. Then the names of the tensors decide: a decoder that
    was saved by itself has names without a prefix, and no ``lm_head``.
    """
    if named.endswith(_HEADLESS_SUFFIX):
        return True
    if not (path / MODULES_FILE).is_file():
        return False
    names = read_tensor_names(path)
    is_tied = config.flag("tie_word_embeddings")
    return bool(names) and ("embed_tokens.weight" in names or not (is_tied or "lm_head.weight" in names))


def read_embedding_config(path: Path, config: JsonObject, size: int) -> EmbeddingConfig:
    """Read the files of sentence-transformers in the directory ``path``, where they exist. Raises ``ModelError``."""
    dimensions = _read_dimensions(config, size)
    if not (path / MODULES_FILE).is_file():
        return EmbeddingConfig(size=size, dimensions=dimensions)
    stages = [_Stage.read(path, each) for each in read_json_list(path / MODULES_FILE)]
    pooling, unsupported = PoolingKind.LAST, ""
    for stage in stages:
        if stage.kind == "Pooling":
            try:
                pooling, unsupported = _read_pooling(stage.path)
            except ModelError as error:  # a chat model does not need it; only embeddings are refused
                unsupported = str(error)
        elif stage.kind not in ("Transformer", "Normalize"):
            unsupported = f"{path / MODULES_FILE}: modules of type {stage.kind!r} are not supported"
    prompts, default_prompt = _read_prompts(path / PROMPTS_FILE)
    return EmbeddingConfig(
        size=size,
        pooling=pooling,
        normalize=any(stage.kind == "Normalize" for stage in stages),
        dimensions=dimensions,
        prompts=prompts,
        default_prompt=default_prompt,
        unsupported=unsupported,
    )


@dataclass(frozen=True, slots=True)
class _Stage:
    """An entry of ``modules.json``: the last part of its class, and its directory."""

    kind: str
    path: Path

    @classmethod
    def read(cls, directory: Path, entry: dict[str, Any]) -> "_Stage":
        fields = JsonObject(str(directory / MODULES_FILE), entry)
        folder = fields.text("path", "").rstrip("/")
        if Path(folder).name != folder or folder == "..":  # a path could lead out of the model directory
            raise ModelError(f"{fields.source}: {folder!r} is not a plain folder name")
        return cls(fields.text("type", "").rpartition(".")[2], directory / folder)


def _read_pooling(directory: Path) -> tuple[PoolingKind, str]:
    """Return the pooling, and the reason for which it is not supported, "" if it is."""
    source = directory / "config.json"
    config = JsonObject(str(source), read_json(source))
    named = config.get("pooling_mode")
    if named is None:
        modes = [mode for flag, mode in _MODE_FLAGS.items() if config.flag(flag)]
    else:
        modes = named if isinstance(named, list) else [named]
    if len(modes) != 1 or modes[0] not in _MODES:
        joined = ", ".join(map(str, modes)) or "none"
        return (
            PoolingKind.LAST,
            f"{source}: pooling mode {joined} is not supported; supported are lasttoken and mean",
        )
    kind = _MODES[modes[0]]
    if kind is PoolingKind.MEAN and not config.flag("include_prompt", True):
        return kind, f"{source}: 'include_prompt' false is not supported"
    return kind, ""


def _read_prompts(path: Path) -> tuple[tuple[tuple[str, str], ...], str]:
    """Return the prompts, and the text of the default one."""
    if not path.is_file():
        return (), ""
    config = JsonObject(str(path), read_json(path))
    listed = config.object("prompts")
    names = [] if listed is None else listed.list_keys()
    if len(names) > MAX_PROMPTS:
        raise ModelError(f"{path} has {len(names)} prompts; at most {MAX_PROMPTS} are supported")
    prompts = {} if listed is None else {name: listed.text(name, "") for name in names}
    for name, text in prompts.items():
        if len(text) > MAX_PROMPT_CHARACTERS:
            raise ModelError(f"{path}: prompt {name!r} is longer than {MAX_PROMPT_CHARACTERS} characters")
    default = config.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise ModelError(f"{path}: 'default_prompt_name' is {default!r}, which is not among the prompts")
    return tuple(prompts.items()), "" if default is None else prompts[default]


def _read_dimensions(config: JsonObject, size: int) -> tuple[int, ...] | None:
    """Return ``EmbeddingConfig.dimensions`` by the keys that vLLM reads, too; most checkpoints have none of them."""
    listed = config.get("matryoshka_dimensions")
    if listed is not None:
        if not isinstance(listed, list) or not all(
            isinstance(each, int) and not isinstance(each, bool) and 1 <= each <= size for each in listed
        ):
            raise ModelError(
                f"{config.source}: 'matryoshka_dimensions' must be a list of numbers from 1 to {size}, not {listed!r}"
            )
        return tuple(sorted(listed))
    return None if config.flag("is_matryoshka", True) else ()
