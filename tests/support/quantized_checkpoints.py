"""Quantized checkpoints edited, transformers with their weights dequantized, and our tokens compared with its own.

Where activations are quantized, a sum that differs in its last bit may be rounded to another number, and few tokens
differ for it. Which ones may is measured: by the same model, whose activations are perturbed by the rounding errors of
sums before they are quantized. Most logits hardly change by that, and some change much, where a rounded activation or
one of an earlier token is at the edge between two numbers. So a token is right if its logit is near the largest one by
the usual change, or if it is the choice of a perturbed model.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from bf16_engine import error_of, tie_of
from fp8_checkpoints import experts_forward
from quantized_formats import Format, Quantize, Tensors
from safetensors.torch import load_file, save_file
from tiny_models import edit_json, load_reference, oracle_choices, oracle_logits

from skiff_runtime.models.checkpoint_files import INDEX_FILE

PERTURBATIONS: Final = 8
RELATIVE_ERROR: Final = 1e-6
"""Of each activation: several roundings of a sum in float32."""
MAX_DIFFERENT: Final = 1 / 16
"""The largest share of tokens that may differ."""


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
    """Load the unquantized model in transformers with these weights, its layers' inputs quantized and dequantized.

    Of a mixture of experts with quantized experts, the activations must be quantized, too.
    """
    oracle = load_reference(plain)

    def quantize_input(_module: Any, given: Any) -> Any:
        assert activations is not None
        return (activations(given[0].flatten(0, -2)).view(given[0].shape).to(given[0].dtype),)

    for name, module in oracle.named_modules():
        if name in weights:
            module.weight.data = weights[name].clone()
            if activations is not None:
                module.register_forward_pre_hook(quantize_input)
        if f"{name}.0.gate_proj" in weights:
            assert activations is not None
            gate_ups, downs = _stack_experts(name, weights)
            module.forward = experts_forward(gate_ups, downs, activations)
    return oracle


def _stack_experts(prefix: str, weights: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights of all experts of a layer as transformers stacks them: gate and up, and down."""
    experts = range(sum(name.startswith(f"{prefix}.") for name in weights) // 3)
    gates, ups, downs = (
        torch.stack([weights[f"{prefix}.{expert}.{linear}"] for expert in experts])
        for linear in ("gate_proj", "up_proj", "down_proj")
    )
    return torch.cat((gates, ups), dim=1), downs


def assert_greedy(
    plain: Path, weights: Tensors, kind: Format, prompts: Sequence[Sequence[int]], outputs: list[list[int]]
) -> None:
    """Check that ``outputs`` are the greedy tokens of these weights in transformers, but for rounding errors of ``kind``."""
    oracle = load_dequantized_reference(plain, weights, kind.activations)
    if kind.activations is None:
        assert oracle_choices(oracle, prompts, outputs) == outputs
        return
    perturbed = load_dequantized_reference(plain, weights, _perturb(kind.activations))
    with torch.inference_mode():
        exact, *others = (
            torch.cat(oracle_logits(each, prompts, outputs)).double()
            for each in (oracle, *[perturbed] * PERTURBATIONS)
        )
    chosen = torch.tensor(outputs).flatten()
    gaps = (exact.amax(-1) - exact.gather(1, chosen[:, None]).squeeze(1)) / exact.abs().amax(-1)
    tie = tie_of(error_of(torch.cat(others), exact.repeat(PERTURBATIONS, 1)))
    is_chosen = torch.stack([other.argmax(-1) == chosen for other in others]).any(0)
    assert bool((is_chosen | (gaps <= tie)).all())
    assert float((gaps > 0).double().mean()) <= MAX_DIFFERENT


def _perturb(activations: Quantize) -> Quantize:
    """Return the quantization of activations with rounding errors, other ones in each call; their seed is fixed."""
    generator = torch.Generator().manual_seed(0)

    def quantize(x: torch.Tensor) -> torch.Tensor:
        return activations(x * (1 + RELATIVE_ERROR * torch.randn(x.shape, generator=generator)))

    return quantize
