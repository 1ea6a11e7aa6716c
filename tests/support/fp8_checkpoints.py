"""FP8 checkpoints as compressed-tensors and FBGEMM write them, transformers with quantized layers, and our tokens."""

import itertools
import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from engine_driver import generate, make_engine
from safetensors.torch import load_file, save_file
from tiny_models import edit_json

from skiff_runtime.kernels.fp8_tensors import quantize_rows
from skiff_runtime.models.checkpoint_files import INDEX_FILE

PROMPTS = [[5, 6, 7], list(range(20, 60)), [9] * 17, list(range(100, 40, -1))]
SCHEME: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True}
GROUP: dict[str, Any] = {
    "targets": ["Linear"],
    "weights": {**SCHEME, "strategy": "channel", "dynamic": False},
    "input_activations": {**SCHEME, "strategy": "token", "dynamic": True},
}
COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["lm_head"],
    "config_groups": {"group_0": GROUP},
    "kv_cache_scheme": None,
}
FBGEMM: dict[str, Any] = {
    "quant_method": "fbgemm_fp8",
    "activation_scale_ub": 1200.0,
    "modules_to_not_convert": ["lm_head"],
}


_LINEAR = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")
"""Endings of the names of quantized weights; the last three are those of Mixtral's experts."""


def quantize(
    path: Path,
    config: dict[str, Any],
    scale_shape: tuple[int, ...] = (-1, 1),
    unquantized: Collection[str] = (),
) -> None:
    """Quantize the linear layers of a checkpoint to FP8, except for routers and for those in ``unquantized``."""
    files = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors = load_file(file)
        for name in [name for name in tensors if name.endswith(_LINEAR)]:
            if name.removesuffix(".weight") not in unquantized:
                tensors[name], scales = quantize_rows(tensors[name])
                tensors[f"{name}_scale"] = scales.reshape(scale_shape)
        save_file(tensors, file)
        files.update(dict.fromkeys(tensors, file.name))
    edit_json(path / INDEX_FILE, weight_map=files)
    edit_json(path / "config.json", quantization_config=config)


def quantize_linear_layers(
    oracle: Any, scale_ub: float = math.inf, unquantized: Collection[str] = ()
) -> None:
    """Make transformers quantize and dequantize weights and activations (clamped to a bound), and multiply in float32.

    The linear layers of experts are among them; routers are not.
    """

    def quantized(values: torch.Tensor) -> torch.Tensor:
        flat, scales = quantize_rows(values.flatten(0, -2))
        return (flat.float() * scales).view(values.shape).to(values.dtype)

    for name, module in oracle.named_modules():
        if name.endswith(".experts") and name not in unquantized:
            weights = quantized(module.gate_up_proj), quantized(module.down_proj)
            module.forward = experts_forward(*weights, quantized)
        if isinstance(module, torch.nn.Linear) and name not in ("lm_head", *unquantized):
            module.weight.data = quantized(module.weight.data)
            module.register_forward_pre_hook(
                lambda _module, given: (quantized(given[0].clamp(-scale_ub, scale_ub)),)
            )


def experts_forward(
    gate_ups: torch.Tensor, downs: torch.Tensor, quantized: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the forward pass of transformers' experts with these weights [experts, outputs, inputs].

    ``quantized`` quantizes and dequantizes the inputs [tokens, inputs] of both products.
    """

    def forward(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(x)
        for token, choice in itertools.product(range(ids.shape[0]), range(ids.shape[1])):
            expert = int(ids[token, choice])
            gate, up = F.linear(quantized(x[token][None]), gate_ups[expert]).chunk(2, dim=-1)
            output = F.linear(quantized(F.silu(gate) * up), downs[expert])
            total[token] += (weights[token, choice] * output[0]).to(total.dtype)
        return total

    return forward


def generate_greedy(path: Path, *, page_size: int = 16, budget: int = 40, **settings: Any) -> list[list[int]]:
    """Generate twelve greedy tokens for each of ``PROMPTS`` by our engine with these settings."""
    engine = make_engine(path, page_size=page_size, **settings)
    outputs = generate(engine, PROMPTS, 12, page_size=page_size, budget=budget, slots=4)
    engine.close()
    return outputs
