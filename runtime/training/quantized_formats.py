"""Quantization of a checkpoint to the published formats, as their reference writers store them.

Every format rounds to the nearest, without calibration. Each writer follows the packing of the library that writes it: transformers
(block FP8), AutoFP8 and llm-compressor (FP8 with one scale for each matrix), compressed-tensors, AutoAWQ, AutoGPTQ.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from skiff_runtime.json_file import read_json
from skiff_runtime.models.checkpoint_files import INDEX_FILE

E4M3: Final = torch.float8_e4m3fn
FP8_MAX: Final = 448.0
BLOCK: Final = 128
AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output, of eight, that AutoAWQ packs into each four bits."""

Tensors = dict[str, torch.Tensor]
Writer = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
"""Quantizes a weight [outputs, inputs]: the tensors by the ends of their names, and the weight dequantized."""
Quantize = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Format:
    """A format of checkpoints: its ``quantization_config``, and how it stores a weight.

    ``activations`` quantizes and dequantizes a layer's input, flattened to [tokens, inputs].
    """

    config: dict[str, Any]
    write: Writer
    activations: Quantize | None = None


def write_checkpoint(path: Path, kind: Format) -> Tensors:
    """Quantize the linear layers of the checkpoint in ``path``; return their weights dequantized, by module."""
    files, weights = {}, {}
    for file in sorted(path.glob("*.safetensors")):
        tensors = load_file(file)
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            module = name.removesuffix(".weight")
            stored, weights[module] = kind.write(tensors.pop(name))
            tensors |= {f"{module}.{end}": tensor.contiguous() for end, tensor in stored.items()}
        save_file(tensors, file)
        files.update(dict.fromkeys(tensors, file.name))
    if (path / INDEX_FILE).exists():
        _write_json(path / INDEX_FILE, {**read_json(path / INDEX_FILE), "weight_map": files})
    _write_json(path / "config.json", {**read_json(path / "config.json"), "quantization_config": kind.config})
    return weights


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value))


def round_to_fp8(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (values.float() / scales).clamp(-FP8_MAX, FP8_MAX).to(E4M3)


def quantize_token_groups(x: torch.Tensor) -> torch.Tensor:
    """Quantize and dequantize each 128 elements of a token."""
    groups = F.pad(x.float(), (0, -x.shape[1] % BLOCK)).view(len(x), -1, BLOCK)
    scales = (groups.abs().amax(2, keepdim=True) / FP8_MAX).clamp(min=1e-12)
    values = (groups * scales.reciprocal()).clamp(-FP8_MAX, FP8_MAX).to(E4M3)
    return (values.float() * scales).flatten(1)[:, : x.shape[1]]


def quantize_tokens(x: torch.Tensor) -> torch.Tensor:
    """Quantize and dequantize each token."""
    scales = (x.float().abs().amax(1, keepdim=True) / FP8_MAX).clamp(min=1e-12)
    return (x.float() * scales.reciprocal()).clamp(-FP8_MAX, FP8_MAX).to(E4M3).float() * scales


def quantize_statically(scale: float) -> Quantize:
    """Return the quantization of activations by one scale."""

    def quantize(x: torch.Tensor) -> torch.Tensor:
        fixed = torch.full((1,), scale, device=x.device)
        return (x.float() * fixed.reciprocal()).clamp(-FP8_MAX, FP8_MAX).to(E4M3).float() * fixed

    return quantize


def block_fp8(scale_dtype: torch.dtype = torch.float32) -> Format:
    """FP8 with a scale for each block of 128 x 128, as Qwen3-*-FP8 (bfloat16 scales) and DeepSeek-V3 (float32)."""

    def write(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        outputs, inputs = weight.shape
        padded = F.pad(weight.float(), (0, -inputs % BLOCK, 0, -outputs % BLOCK))
        blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, -1, BLOCK)
        scales = (blocks.abs().amax((1, 3)) / FP8_MAX).to(scale_dtype)
        spread = scales.float()[:, None, :, None]
        values = round_to_fp8(blocks, spread)
        whole = (values.float() * spread).view(padded.shape)[:outputs, :inputs]
        return {"weight": values.view(padded.shape)[:outputs, :inputs], "weight_scale_inv": scales}, whole

    config = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    }
    return Format(config, write, quantize_token_groups)


INPUT_SCALE: Final = 0.03
"""The scale of activations in checkpoints that store one."""


def tensor_fp8(*, static: bool, compressed: bool) -> Format:
    """FP8 with one scale for each matrix, as AutoFP8 (``fp8``) or llm-compressor (compressed-tensors) write it."""

    def write(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        scale = weight.float().abs().amax() / FP8_MAX
        values = round_to_fp8(weight, scale)
        shape = (1,) if compressed else ()
        stored = {"weight": values, "weight_scale": scale.view(shape)}
        if static:
            stored["input_scale"] = torch.full(shape, INPUT_SCALE)
        return stored, values.float() * scale

    scheme = {"num_bits": 8, "type": "float", "symmetric": True}
    activations: dict[str, Any] = {**scheme, "strategy": "token", "dynamic": True}
    if static:
        activations = {**scheme, "strategy": "tensor", "dynamic": False}
    group = {
        "targets": ["Linear"],
        "weights": {**scheme, "strategy": "tensor", "dynamic": False},
        "input_activations": activations,
    }
    config: dict[str, Any] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    if not compressed:
        config = {
            "quant_method": "fp8",
            "activation_scheme": "static" if static else "dynamic",
            "ignored_layers": ["lm_head"],
        }
    return Format(config, write, quantize_statically(INPUT_SCALE) if static else quantize_tokens)


@dataclass(frozen=True)
class Integers:
    """A weight in 4-bit integers: ``values`` uint8 [outputs, inputs], ``scales`` and ``zeros`` [outputs, groups]."""

    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor

    def dequantize(self) -> torch.Tensor:
        """Return the weight, float32."""
        size = self.values.shape[1] // self.scales.shape[1]
        zeros, scales = (each.float().repeat_interleave(size, 1) for each in (self.zeros, self.scales))
        return (self.values.float() - zeros) * scales


def quantize_int4(
    weight: torch.Tensor, group_size: int | None, *, symmetric: bool, scale_dtype: torch.dtype
) -> Integers:
    """Round each group of inputs to 16 steps: around zero, or from its least to its largest weight."""
    outputs, inputs = weight.shape
    groups = weight.float().view(outputs, -1, group_size or inputs)
    if symmetric:
        scales = (groups.abs().amax(2) / 7.5).to(scale_dtype)
        zeros = torch.full(scales.shape, 8, dtype=torch.uint8)
    else:
        low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
        scales = ((high - low) / 15).to(scale_dtype)
        zeros = (-low / scales.float()).round().clamp(0, 15).to(torch.uint8)
    values = (groups / scales.float()[:, :, None]).round() + zeros[:, :, None]
    return Integers(values.clamp(0, 15).to(torch.uint8).view(outputs, inputs), scales, zeros)


def pack_words(values: torch.Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Pack eight consecutive integers along ``dim`` into an int32: ``order[i]`` of them into the four bits i."""
    moved = values.movedim(dim, -1).to(torch.int64)
    moved = F.pad(moved, (0, -moved.shape[-1] % 8))
    eights = torch.unflatten(moved, -1, (-1, 8))
    words = sum(eights[..., number] << (4 * i) for i, number in enumerate(order))
    assert isinstance(words, torch.Tensor)
    signed = torch.where(words >= 1 << 31, words - (1 << 32), words)
    return signed.to(torch.int32).movedim(-1, dim)


def compressed_int4(group_size: int | None, *, symmetric: bool) -> Format:
    """Compressed-tensors' pack-quantized: integers along the inputs, zero points along the outputs."""

    def write(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        integers = quantize_int4(weight, group_size, symmetric=symmetric, scale_dtype=torch.float32)
        stored = {
            "weight_packed": pack_words(integers.values, 1),
            "weight_scale": integers.scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            stored["weight_zero_point"] = pack_words(integers.zeros, 0)
        return stored, integers.dequantize()

    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "channel" if group_size is None else "group",
        "group_size": group_size,
        "dynamic": False,
        "actorder": None,
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    return Format(config, write)


def awq(group_size: int | None) -> Format:
    """AutoAWQ's gemm version: integers and zero points along the outputs, in its interleaved order; float16 scales."""

    def write(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        integers = quantize_int4(weight, group_size, symmetric=False, scale_dtype=torch.float16)
        return {
            "qweight": pack_words(integers.values.T, 1, AWQ_ORDER),
            "qzeros": pack_words(integers.zeros.T, 1, AWQ_ORDER),
            "scales": integers.scales.T,
        }, integers.dequantize()

    config = {
        "quant_method": "awq",
        "version": "gemm",
        "bits": 4,
        "group_size": group_size or -1,
        "zero_point": True,
        "modules_to_not_convert": None,
    }
    return Format(config, write)


def gptq(
    group_size: int | None, *, symmetric: bool = True, desc_act: bool = False, version: str = "gptq"
) -> Format:
    """GPTQ: integers along the inputs and zero points along the outputs, the latter less one in its first version.

    With ``desc_act`` the groups are of inputs that are not beside each other.
    """

    def write(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        inputs = weight.shape[1]
        size = group_size or inputs
        order = torch.arange(inputs)
        if desc_act:
            order = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
        integers = quantize_int4(weight[:, order], group_size, symmetric=symmetric, scale_dtype=torch.float16)
        back = torch.argsort(order)
        zeros = integers.zeros.int() - (1 if version == "gptq" else 0) & 15
        return {
            "qweight": pack_words(integers.values[:, back].T, 0),
            "qzeros": pack_words(zeros.T, 1),
            "scales": integers.scales.T,
            "g_idx": (back // size).to(torch.int32),
        }, integers.dequantize()[:, back]

    config = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": group_size or -1,
        "desc_act": desc_act,
        "sym": symmetric,
        "checkpoint_format": version,
        "static_groups": False,
        "true_sequential": True,
        "lm_head": False,
    }
    return Format(config, write)


FORMATS: Final[dict[str, Format]] = {
    "block-fp8": block_fp8(),
    "block-fp8-bf16-scales": block_fp8(torch.bfloat16),
    "tensor-fp8": tensor_fp8(static=False, compressed=False),
    "tensor-fp8-static": tensor_fp8(static=True, compressed=False),
    "compressed-tensor-fp8": tensor_fp8(static=False, compressed=True),
    "compressed-tensor-fp8-static": tensor_fp8(static=True, compressed=True),
    "compressed-int4": compressed_int4(128, symmetric=True),
    "compressed-int4-asymmetric": compressed_int4(32, symmetric=False),
    "compressed-int4-channel": compressed_int4(None, symmetric=True),
    "awq": awq(128),
    "awq-64": awq(64),
    "awq-channel": awq(None),
    "gptq": gptq(128),
    "gptq-asymmetric": gptq(64, symmetric=False),
    "gptq-desc-act": gptq(32, desc_act=True),
    "gptq-v2": gptq(128, symmetric=False, version="gptq_v2"),
    "gptq-channel": gptq(None),
}
"""Formats that are served, by name."""
