"""Tiny real models, made on the fly: seeded random weights in transformers' own format, with a tokenizer.

Weights are drawn wide, norms and biases included, so that greedy tokens are far from ties
and every weight that is forgotten or misplaced changes the output.
"""

import json
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import torch
from tiny_tokenizer import BOS_ID, EOS_ID, VOCAB_SIZE, write_tokenizer
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from skiff_runtime.engine.cpu import avoid_trapping_amx

avoid_trapping_amx()  # before the process's first product, which may be one of the oracle's

_SHAPE: Final[dict[str, Any]] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
}
_LLAMA3_ROPE: Final = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

MOE_FAMILIES: Final = ("qwen3_moe", "mixtral")
"""Mixtures of experts; the second layer of ``qwen3_moe`` is dense."""
FAMILIES: Final = ("llama", "llama_tied", "qwen2", "qwen3", "mistral", *MOE_FAMILIES)
"""Names that ``make_model`` knows; ``llama`` has llama3 rope scaling and biases nowhere."""
_QWEN3_MOE: Final[dict[str, Any]] = {
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
}


def make_model(
    directory: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shard_size: str = "80KB",
    **overrides: Any,
) -> Path:
    """Write a model of ``family`` with tokenizer into ``directory`` and return it.

    ``overrides`` replace fields of the configuration, by values that JSON can express; ``shard_size`` cuts the weights
    into several files.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in _model_files(family, seed, dtype, shard_size, json.dumps(overrides, sort_keys=True)):
        (directory / name).write_bytes(content)
    torch.manual_seed(seed)  # whether the files were made now or before
    return directory


@lru_cache(maxsize=8)
def _model_files(
    family: str, seed: int, dtype: torch.dtype, shard_size: str, overrides: str
) -> tuple[tuple[str, bytes], ...]:
    """Make a model and return the names and contents of its files. ``overrides`` is JSON.

    The tests of a file often make the same model anew.
    """
    config = _config(family, json.loads(overrides))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    _widen(model, seed)
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        model.to(dtype).save_pretrained(directory, max_shard_size=shard_size)
        write_tokenizer(directory)
        return tuple((path.name, path.read_bytes()) for path in sorted(directory.iterdir()))


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; a key whose value is ``...`` is removed."""
    value = json.loads(path.read_text())
    for key, new in changes.items():
        if new is ...:
            value.pop(key, None)
        else:
            value[key] = new
    path.write_text(json.dumps(value))


def load_reference(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The same model in transformers: the oracle."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager")
    return model.eval()


@torch.inference_mode()
def greedy_tokens(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """``count`` greedy tokens after ``prompt``, end tokens treated like any other."""
    output: list[int] = []
    cache, ids = None, torch.tensor([list(prompt)])
    for _ in range(count):
        step = model(ids, past_key_values=cache, use_cache=True)
        cache, ids = step.past_key_values, step.logits[:, -1:].argmax(-1)
        output.append(int(ids))
    return output


@torch.inference_mode()
def oracle_logits(
    model: Any, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    """For each prompt, the logits float32 [len(output), vocab] from which each of its output tokens is chosen."""
    rows = [[*prompt, *output] for prompt, output in zip(prompts, outputs, strict=True)]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    logits = model(ids, attention_mask=torch.ones_like(ids)).logits.float()
    return [
        logits[number, len(prompt) - 1 : len(prompt) + len(output) - 1]
        for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
    ]


def oracle_choices(
    model: Any, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]
) -> list[list[int]]:
    """The oracle's greedy token at each place of each output, given what stands before it.

    All outputs are greedy if and only if this equals ``outputs``; one forward pass
    (rows padded at their ends, which causal attention never sees) instead of one per token.
    """
    return [logits.argmax(-1).tolist() for logits in oracle_logits(model, prompts, outputs)]


def _config(family: str, overrides: dict[str, Any]) -> Any:
    shape = {**_SHAPE, **overrides}
    match family:
        case "llama":
            return LlamaConfig(**{"rope_parameters": _LLAMA3_ROPE, **shape})
        case "llama_tied":
            return LlamaConfig(**shape, tie_word_embeddings=True)
        case "qwen2":
            return Qwen2Config(**shape)
        case "qwen3":
            return Qwen3Config(**{"head_dim": 32, **shape})
        case "mistral":
            return MistralConfig(**{"sliding_window": None, **shape})
        case "qwen3_moe":
            return Qwen3MoeConfig(**{**_QWEN3_MOE, **shape})
        case "mixtral":
            return MixtralConfig(**{"num_local_experts": 4, "num_experts_per_tok": 2, **shape})
    raise ValueError(f"unknown family {family!r}; known are {', '.join(FAMILIES)}")


@torch.no_grad()
def _widen(model: torch.nn.Module, seed: int) -> None:
    """Draw every parameter anew: matrices wide, norms around one, biases around zero."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("norm.weight"):
            parameter.copy_(1.0 + 0.2 * noise)
        elif parameter.dim() == 1:
            parameter.copy_(0.3 * noise)
        else:
            parameter.copy_(noise * (1.5 / parameter.shape[-1] ** 0.5))
