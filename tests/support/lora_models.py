"""LoRA adapters of tiny models, made and computed by peft: the oracle of adapters."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_models import load_reference

ATTENTION: Final = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL: Final = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


def make_adapter(
    directory: Path,
    model: Path,
    *,
    seed: int,
    modules: Sequence[str] = ALL,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Path:
    """Write an adapter of the model with random matrices into ``directory`` and return it.

    ``options`` are fields of ``LoraConfig``. The matrices are so large that most tokens differ from those of the base.
    """
    settings = {"r": 4, "lora_alpha": 8, **options}
    adapted = get_peft_model(load_reference(model), LoraConfig(target_modules=list(modules), **settings))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data.copy_(noise * (0.5 / parameter.shape[-1] ** 0.5))
    adapted.to(dtype).save_pretrained(str(directory))
    return directory


def load_adapted(model: Path, adapter: Path) -> Any:
    """Return the model with the adapter in peft, in float32."""
    return PeftModel.from_pretrained(load_reference(model), str(adapter)).eval()


def merge(model: Path, adapter: Path) -> Any:
    """Return the model in transformers with the adapter added to its weights, in float32."""
    return load_adapted(model, adapter).merge_and_unload()
