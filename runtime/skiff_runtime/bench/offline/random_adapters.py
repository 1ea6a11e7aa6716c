"""LoRA adapters with random weights for ``skiff bench offline``, in the files that peft writes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
from safetensors.numpy import save_file

from skiff_runtime.hub.repository import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from skiff_runtime.models.config import ModelConfig

PREFIX: Final = "base_model.model.model.layers."
"""The beginning of the tensors' names, as peft writes them."""
SPREAD: Final = 0.01
"""Bound of the weights. Their values do not matter for the time of a step, but must be finite after all layers."""


def write_random_adapters(
    directory: Path, model: ModelConfig, *, count: int, rank: int, seed: int
) -> list[Path]:
    """Write ``count`` adapters of all projections that can be adapted, in float16, and return their directories."""
    generator = np.random.default_rng(seed)
    return [_write_adapter(directory / f"{number}", model, rank, generator) for number in range(count)]


def _write_adapter(path: Path, model: ModelConfig, rank: int, generator: np.random.Generator) -> Path:
    tensors = {}
    for name, inputs, outputs in _list_modules(model):
        for matrix, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            values = generator.random(shape, dtype=np.float32) - np.float32(0.5)
            tensors[f"{name}.lora_{matrix}.weight"] = (2 * SPREAD * values).astype(np.float16)
    path.mkdir()
    save_file(tensors, path / ADAPTER_WEIGHTS)
    modules = list(dict.fromkeys(name.rsplit(".", 1)[1] for name, *_ in _list_modules(model)))
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none", "target_modules": modules}
    (path / ADAPTER_CONFIG).write_text(json.dumps(settings))
    return path


def _list_modules(model: ModelConfig) -> Iterator[tuple[str, int, int]]:
    """Yield name, inputs and outputs of each projection of attention, and of the MLP where it has no experts."""
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    modules = [
        ("self_attn.q_proj", model.hidden_size, queries),
        ("self_attn.k_proj", model.hidden_size, keys),
        ("self_attn.v_proj", model.hidden_size, keys),
        ("self_attn.o_proj", queries, model.hidden_size),
    ]
    if model.moe is None:
        modules += [
            ("mlp.gate_proj", model.hidden_size, model.intermediate_size),
            ("mlp.up_proj", model.hidden_size, model.intermediate_size),
            ("mlp.down_proj", model.intermediate_size, model.hidden_size),
        ]
    for layer in range(model.num_layers):
        for name, inputs, outputs in modules:
            yield f"{PREFIX}{layer}.{name}", inputs, outputs
