"""The linear projections of a decoder layer, each one matrix that packs modules of the checkpoint; imports no torch."""

from typing import Final, Literal

Projection = Literal["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]

PACKED_MODULES: Final[dict[Projection, tuple[str, ...]]] = {
    "qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o_proj": ("self_attn.o_proj",),
    "gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "down_proj": ("mlp.down_proj",),
}
"""The checkpoint's modules that each projection packs, by their names within a decoder layer."""

UnquantizedProjections = tuple[tuple[int, Projection], ...]
"""(Index of the decoder layer, projection), in order: those that a quantized checkpoint keeps in the model's dtype."""
