"""Quantized checkpoints edited, and transformers with their weights dequantized."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from quantized_formats import Quantize, Tensors
from safetensors.torch import load_file, save_file
from tiny_models import edit_json, load_reference

from skiff_runtime.models.checkpoint import INDEX_FILE


def edit_tensors(path: Path, edit: Callable[[Tensors], None]) -> None:
    """Let ``edit`` change the tensors of each file of a checkpoint."""
    files = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors = load_file(file)
        edit(tensors)
        save_file(tensors, file)
        files.update(dict.fromkeys(tensors, file.name))
    edit_json(path / INDEX_FILE, weight_map=files)


def load_dequantized_reference(plain: Path, weights: Tensors, activations: Quantize | None = None) -> Any:
    """Load the unquantized model in transformers with these weights, its layers' inputs quantized and dequantized."""
    oracle = load_reference(plain)

    def quantize_input(_module: Any, given: Any) -> Any:
        assert activations is not None
        return (activations(given[0].flatten(0, -2)).view(given[0].shape).to(given[0].dtype),)

    for name, module in oracle.named_modules():
        if name in weights:
            module.weight.data = weights[name].clone()
            if activations is not None:
                module.register_forward_pre_hook(quantize_input)
    return oracle
