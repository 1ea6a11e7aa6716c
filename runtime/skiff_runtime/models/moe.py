"""Mixture-of-experts settings of a model, read from its configuration; imports no torch."""

from dataclasses import dataclass
from typing import Final

from skiff_runtime.errors import ModelError
from skiff_runtime.json_file import JsonObject
from skiff_runtime.layers.moe_config import MoeConfig, MoeModules
from skiff_runtime.models.limits import MAX_EXPERTS

_COUNT_KEYS: Final = ("num_experts", "num_local_experts")
"""Qwen's and Mixtral's name; transformers 5 writes the second for both."""


@dataclass(frozen=True, slots=True)
class MoeFamily:
    """Settings that a family has in place of keys of ``config.json``, and the names of its modules.

    ``renormalize`` is None where the key ``norm_topk_prob`` decides.
    """

    intermediate_key: str
    renormalize: bool | None
    modules: MoeModules


FAMILIES: Final = {
    "MixtralForCausalLM": MoeFamily(
        intermediate_key="intermediate_size",
        renormalize=True,
        modules=MoeModules(block="block_sparse_moe", gate="w1", up="w3", down="w2"),
    ),
    "Qwen3MoeForCausalLM": MoeFamily(
        intermediate_key="moe_intermediate_size", renormalize=None, modules=MoeModules()
    ),
}
"""By architecture; all other architectures are dense."""


def read_moe(config: JsonObject, architecture: str, layers: int) -> MoeConfig | None:
    """Return the mixture of experts of a model of ``layers`` decoder layers; None for a dense model.

    Raises ``ModelError`` for settings that are malformed or contradictory.
    """
    family = FAMILIES.get(architecture)
    if family is None:
        return None
    experts, top_k = _count_experts(config), config.positive("num_experts_per_tok")
    if top_k > experts:
        raise ModelError(
            f"{config.source}: 'num_experts_per_tok' is {top_k}, but there are {experts} experts"
        )
    renormalize = family.renormalize
    return MoeConfig(
        num_experts=experts,
        top_k=top_k,
        intermediate_size=config.positive(family.intermediate_key),
        renormalize=config.flag("norm_topk_prob") if renormalize is None else renormalize,
        dense_layers=_dense_layers(config, layers),
        modules=family.modules,
    )


def _count_experts(config: JsonObject) -> int:
    counts = {config.positive(key, limit=MAX_EXPERTS) for key in _COUNT_KEYS if config.get(key) is not None}
    if len(counts) > 1:
        raise ModelError(f"{config.source}: {' and '.join(map(repr, _COUNT_KEYS))} contradict each other")
    return counts.pop() if counts else config.positive(_COUNT_KEYS[0], limit=MAX_EXPERTS)


def _dense_layers(config: JsonObject, layers: int) -> tuple[int, ...]:
    """Return the layers that ``mlp_only_layers`` lists, and those that are not every ``decoder_sparse_step``-th."""
    listed, step = config.get("mlp_only_layers") or [], config.positive("decoder_sparse_step", 1)
    if not isinstance(listed, list) or not all(
        type(layer) is int and 0 <= layer < layers for layer in listed
    ):
        raise ModelError(
            f"{config.source}: 'mlp_only_layers' must list layers from 0 to {layers - 1}, not {listed!r}"
        )
    without = frozenset(listed)
    return tuple(layer for layer in range(layers) if layer in without or (layer + 1) % step)
