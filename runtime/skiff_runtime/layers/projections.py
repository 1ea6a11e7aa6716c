"""The products of a decoder layer, each of one matrix that joins layers of a checkpoint; no torch."""

from typing import Final, Literal

Product = Literal["qkv", "output", "gate_up", "down"]

PACKED_MODULES: Final[dict[Product, tuple[str, ...]]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""The checkpoint's layers of each, by their names within a decoder layer."""

UnquantizedProjections = tuple[tuple[int, Product], ...]
"""Products of decoder layers, counted from 0 and in order, that stay in the model's own type where the others are in eight bits."""
