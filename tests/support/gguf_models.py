"""Tiny models as GGUF files, written by the ``gguf`` package from models in transformers' format, and their oracle."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final
from unittest import mock

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from numpy.typing import NDArray
from safetensors.torch import load_file
from tiny_models import make_model
from transformers import AutoConfig, AutoModelForCausalLM

ARCHITECTURES: Final = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""GGUF's architecture by transformers' type of a model."""
WIDE: Final[dict[str, Any]] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "head_dim": 64,
}
"""A shape whose rows are whole blocks of every GGML type."""
QUANTIZED_BY_PACKAGE: Final = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
"""Types that the package can quantize to; of others, blocks of random bytes are written."""
_SCALES: Final[dict[str, tuple[tuple[int, float], ...]]] = {
    "Q2_K": ((80, 0.006), (82, 0.009)),
    "Q3_K": ((108, 0.002),),
    "Q4_K": ((0, 0.0004), (2, 0.003)),
    "Q5_K": ((0, 0.0002), (2, 0.003)),
    "Q6_K": ((208, 0.00007),),
    "IQ4_XS": ((0, 0.0001),),
    "TQ2_0": ((64, 0.1),),
}
"""Offsets of a block's float16 scales, with values that make its elements about as large as a model's weights."""
_NORMAL, _CONTROL, _UNUSED = 1, 3, 5
_LAYER_NAMES: Final = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}

EditWriter = Callable[[gguf.GGUFWriter], None]


def make_gguf(
    directory: Path,
    family: str = "llama",
    kind: str = "F32",
    *,
    edit: EditWriter | None = None,
    **options: Any,
) -> Path:
    """Write a model of ``family`` in both formats; return its GGUF file, whose matrices are of GGML type ``kind``.

    ``edit`` may add metadata and tensors; ``options`` are those of ``make_model``.
    """
    model = make_model(directory / "hf", family, **{**WIDE, **options})
    return write_gguf(model, directory / f"tiny-{kind}.gguf", kind, edit=edit)


def write_gguf(model: Path, target: Path, kind: str = "F32", *, edit: EditWriter | None = None) -> Path:
    """Write the model in transformers' format in ``model`` as the GGUF file ``target``, and return it."""
    config = json.loads((model / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(target, architecture)
    _add_config(writer, config)
    _add_tokenizer(writer, model, config["vocab_size"])
    random = np.random.default_rng(0)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for file in sorted(model.glob("*.safetensors")):
        for name, weight in sorted(load_file(file).items()):
            values = weight.float().numpy()
            stored = _gguf_name(name)
            part = stored.split(".")[-2]
            if architecture == "llama" and part in heads:
                values = permute(values, heads[part])
            _add_tensor(writer, stored, values, kind if values.ndim > 1 else "F32", random)
    if config.get("rope_parameters", {}).get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(config))
    if edit is not None:
        edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def load_gguf_reference(path: Path, config: Path | None = None) -> Any:
    """The model in a GGUF file as transformers reads it: the oracle.

    ``config`` is the directory of a ``config.json``, for what transformers does not read from a GGUF file: Qwen3's head
    dimension and the scaling of Llama 3.1.
    """
    options = {} if config is None else {"config": AutoConfig.from_pretrained(config)}
    with _read_once():
        model = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager", **options
        )
    return model.eval()


@contextmanager
def _read_once() -> Iterator[None]:
    """Let transformers parse a file and build the map of its tensors' names once: it does so twice and for each module."""
    with ExitStack() as stack:
        for name in ("GGUFReader", "get_tensor_name_map"):
            stack.enter_context(mock.patch.object(gguf, name, cache(getattr(gguf, name))))
        yield


def permute(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Interleave the halves of each head's rows, as llama.cpp's converter does for its rotary embedding."""
    split = values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:])
    return split.swapaxes(1, 2).reshape(values.shape)


def random_blocks(kind: str, rows: int, columns: int, random: np.random.Generator) -> NDArray[np.uint8]:
    """Return rows of blocks of random bytes, with scales as in ``_SCALES`` where those are known."""
    block, size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = random.integers(0, 256, (rows * columns // block, size), dtype=np.uint8)
    for offset, scale in _SCALES.get(kind, ()):
        blocks[:, offset : offset + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    return blocks.reshape(rows, -1)


def _add_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config.get("rope_parameters") or {}
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def _add_tokenizer(writer: gguf.GGUFWriter, model: Path, vocab_size: int) -> None:
    file = json.loads((model / "tokenizer.json").read_text())
    settings = json.loads((model / "tokenizer_config.json").read_text())
    ids = dict(file["model"]["vocab"])
    ids |= {added["content"]: added["id"] for added in file["added_tokens"]}
    special = {added["content"] for added in file["added_tokens"] if added["special"]}
    names = {number: token for token, number in ids.items()}
    tokens = [names.get(number, f"[PAD{number}]") for number in range(vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [_CONTROL if token in special else _NORMAL if token in ids else _UNUSED for token in tokens]
    )
    writer.add_token_merges(
        [merge if isinstance(merge, str) else " ".join(merge) for merge in file["model"]["merges"]]
    )
    writer.add_bos_token_id(ids[settings["bos_token"]])
    writer.add_eos_token_id(ids[settings["eos_token"]])
    writer.add_add_bos_token(True)
    writer.add_chat_template(settings["chat_template"])


def _add_tensor(
    writer: gguf.GGUFWriter, name: str, values: NDArray[np.float32], kind: str, random: np.random.Generator
) -> None:
    number = GGMLQuantizationType[kind]
    if kind in QUANTIZED_BY_PACKAGE:
        writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(values), number), raw_dtype=number)
    else:
        rows, columns = values.shape
        writer.add_tensor(name, random_blocks(kind, rows, columns, random), raw_dtype=number)


def _gguf_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    outer = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    if module in outer:
        return f"{outer[module]}.{kind}"
    _, _, layer, part = module.split(".", 3)
    return f"blk.{layer}.{_LAYER_NAMES[part]}.{kind}"


def _llama3_factors(config: dict[str, Any]) -> NDArray[np.float32]:
    """Return the divisors of the rotary frequencies by Llama 3.1's formula, as llama.cpp's converter stores them."""
    rope = config["rope_parameters"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    original = rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    factors = []
    for index in range(0, head_dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (index / head_dim)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(rope["factor"])
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, dtype=np.float32)
