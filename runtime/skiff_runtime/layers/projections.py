"""The linear projections of a decoder layer, each one matrix that packs modules of the checkpoint; imports no torch."""

from collections.abc import Iterator
from typing import Final, Literal

from skiff_runtime.layers.moe_config import MoeConfig

Projection = Literal["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]

PACKED_MODULES: Final[dict[Projection, tuple[str, ...]]] = {
    "qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o_proj": ("self_attn.o_proj",),
    "gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "down_proj": ("mlp.down_proj",),
}
"""The checkpoint's modules that each projection packs, by their names within a dense decoder layer."""

UnquantizedProjections = tuple[tuple[int, Projection], ...]
"""(Index of the decoder layer, projection), in order: those that a quantized checkpoint keeps in the model's dtype."""


def packed_modules(
    layer: int, moe: MoeConfig | None
) -> Iterator[tuple[tuple[Projection, ...], tuple[str, ...]]]:
    """Yield groups of projections of a decoder layer that have one quantization, with the modules that they pack.

    In a sparse layer, both projections of all experts are one group, because one operation computes them.
    """
    if moe is None or layer in moe.dense_layers:
        for projection, modules in PACKED_MODULES.items():
            yield (projection,), modules
        return
    attention: tuple[Projection, ...] = ("qkv_proj", "o_proj")
    for projection in attention:
        yield (projection,), PACKED_MODULES[projection]
    names = moe.modules
    yield (
        ("gate_up_proj", "down_proj"),
        tuple(
            f"{names.block}.{names.experts}.{expert}.{linear}"
            for expert in range(moe.num_experts)
            for linear in (names.gate, names.up, names.down)
        ),
    )
