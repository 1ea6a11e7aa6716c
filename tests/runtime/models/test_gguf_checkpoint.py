"""Weights of GGUF files: dequantized as by the ``gguf`` package, in any range of rows and columns, and served alike."""

import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from engine_driver import generate, make_engine
from gguf import GGMLQuantizationType, GGUFWriter
from gguf_models import load_gguf_reference, make_gguf, permute, random_blocks
from gpus import needs_gpus
from rank_functions import generated
from rank_processes import on_ranks, single_rank
from tiny_models import load_reference, oracle_choices

from skiff_runtime.config import Quantization
from skiff_runtime.distributed.tensor_parallel import TensorParallelGroup
from skiff_runtime.errors import ModelError
from skiff_runtime.gguf.ggml_types import GGML_TYPES
from skiff_runtime.gguf.header import read_header
from skiff_runtime.kernels.fp8_tensors import quantize_rows
from skiff_runtime.layers.sharding import LayerContext, WeightShard
from skiff_runtime.models import gguf_checkpoint
from skiff_runtime.models.config import read_model_config
from skiff_runtime.models.footprint import count_parameters
from skiff_runtime.models.gguf_checkpoint import GgufCheckpoint, GgufSource
from skiff_runtime.models.registry import make_model as build
from skiff_runtime.models.weight_loader import load_weights

PROMPTS = [[5, 6, 7], list(range(20, 60)), [9] * 17, list(range(100, 40, -1))]
TOKENS = 12
SERVED = [
    ("llama", "F32"),
    ("llama", "F16"),
    ("llama", "BF16"),
    ("llama", "Q8_0"),
    ("llama", "Q4_1"),
    ("llama", "Q4_K"),
    ("llama_tied", "Q6_K"),
    ("mistral", "Q4_0"),
    ("qwen2", "Q5_0"),
    ("qwen2", "Q5_K"),
    ("qwen3", "Q8_0"),
    ("qwen3", "Q6_K"),
]


def load(
    path: Path, *, quantization: Quantization = "none", tp_rank: int = 0, tp_size: int = 1
) -> dict[str, WeightShard]:
    """Load a rank's model, and return its weight shards by name."""
    context = LayerContext(
        torch.float32, torch.device("cpu"), TensorParallelGroup(tp_rank, tp_size), quantization
    )
    model = build(read_model_config(path), context, max_positions=8)
    shares: list[float] = []
    load_weights(model, "auto", shares.append)
    assert shares == sorted(shares) and shares[-1] == 1.0
    return {shard.name: shard for shard in model.weight_shards()}


def greedy(path: Path, **settings: Any) -> list[list[int]]:
    """Generate greedy tokens for each of ``PROMPTS`` by our engine."""
    engine = make_engine(path, page_size=16, **settings)
    outputs = generate(engine, PROMPTS, TOKENS, page_size=16, budget=40, slots=4)
    engine.close()
    return outputs


@pytest.mark.parametrize("kind", [each.name for each in GGML_TYPES.values()])
def test_rows_and_columns_are_dequantized_as_by_the_package(tmp_path: Path, kind: str) -> None:
    """The blocks are random bytes, so some scales are infinite or not a number."""
    rows, columns = 40, 1024
    random = np.random.default_rng(int.from_bytes(kind.encode()))
    blocks = random_blocks(kind, rows, columns, random)
    number = GGMLQuantizationType[kind]
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("before", np.ones(7, np.float32))
    writer.add_tensor("blocks", blocks, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(blocks, number)
    tensor = read_header(tmp_path / "model.gguf").tensors["blocks"]
    descriptor = os.open(tmp_path / "model.gguf", os.O_RDONLY)
    source = GgufSource(descriptor, tmp_path / "model.gguf", "blocks", tensor)
    np.testing.assert_array_equal(source.read_rows(0, rows).numpy(), expected)
    for first, count, start, stop in [(0, 1, 0, 1), (7, 20, 256, 512), (39, 1, 100, 900), (3, 5, 1000, 1024)]:
        found = source.read_rows(first, count, (start, stop))
        np.testing.assert_array_equal(found.numpy(), expected[first : first + count, start:stop])
    os.close(descriptor)


@pytest.mark.parametrize(("family", "kind"), SERVED)
def test_tokens_equal_transformers_on_the_same_file(tmp_path: Path, family: str, kind: str) -> None:
    path = make_gguf(tmp_path, family, kind, seed=3)
    outputs = greedy(path)
    # A file of Mistral's is one of the architecture llama, to transformers as well.
    reference = load_gguf_reference(path, None if family == "mistral" else tmp_path / "hf")
    assert oracle_choices(reference, PROMPTS, outputs) == outputs
    assert count_parameters(read_model_config(path)).total == reference.num_parameters()


def test_unquantized_file_is_the_model_that_it_was_made_of(tmp_path: Path) -> None:
    """Llama 3.1's scaling is a tensor of factors in a GGUF file, which transformers does not read from there."""
    path = make_gguf(tmp_path, "llama", seed=4)
    assert "rope_freqs.weight" in read_header(path).tensors
    outputs = greedy(path)
    assert outputs == greedy(tmp_path / "hf")
    assert oracle_choices(load_reference(tmp_path / "hf"), PROMPTS, outputs) == outputs


def test_tokens_with_a_sliding_window_equal_transformers(tmp_path: Path) -> None:
    """Prompts and answers exceed the window, which transformers reads from the ``config.json`` of Mistral."""

    def add_window(writer: GGUFWriter) -> None:
        writer.add_sliding_window(16)

    path = make_gguf(tmp_path, "mistral", seed=7, sliding_window=16, edit=add_window)
    model = read_model_config(path)
    assert model.sliding_windows == (16,) * model.num_layers
    outputs = greedy(path)
    assert oracle_choices(load_reference(tmp_path / "hf"), PROMPTS, outputs) == outputs


def test_biases_of_llama_are_permuted_like_its_weights(tmp_path: Path) -> None:
    path = make_gguf(tmp_path, "llama", attention_bias=True, mlp_bias=True, seed=5)
    outputs = greedy(path)
    assert oracle_choices(load_reference(tmp_path / "hf"), PROMPTS, outputs) == outputs


@needs_gpus(2)
@pytest.mark.parametrize(("family", "kind"), [("llama", "Q4_K"), ("qwen3", "Q8_0")])
def test_two_ranks_generate_the_tokens_of_one(tmp_path: Path, family: str, kind: str) -> None:
    """The output projection has one block of Q4_K in a row, of which each rank uses a half."""
    path = make_gguf(tmp_path, family, kind, seed=6)
    first, second = on_ranks(2, tmp_path, generated, path, PROMPTS, TOKENS)
    assert first == second == generated(single_rank(), path, PROMPTS, TOKENS)


@pytest.mark.parametrize("tp_size", [2, 4])
def test_shards_of_ranks_are_slices_of_the_whole(tmp_path: Path, tp_size: int) -> None:
    path = make_gguf(tmp_path, "llama", "Q6_K", attention_bias=True)
    whole = load(path)
    for rank in range(tp_size):
        for name, shard in load(path, tp_rank=rank, tp_size=tp_size).items():
            part = slice(shard.start, shard.stop)
            index: Any = part if shard.dim == 0 else (slice(None), part)
            assert torch.equal(shard.target, whole[name].target[index]), name


def test_weights_are_the_same_in_pieces_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_gguf(tmp_path, "llama", "Q4_0")
    whole = load(path)
    monkeypatch.setattr(gguf_checkpoint, "DEQUANTIZED_BYTES", 1)
    for name, shard in load(path).items():
        assert torch.equal(shard.target, whole[name].target), name


def test_dequantized_weights_are_quantized_to_fp8(tmp_path: Path) -> None:
    path = make_gguf(tmp_path, "llama", "Q8_0")
    plain = load(path)
    quantized = 0
    for name, shard in load(path, quantization="fp8").items():
        if shard.scales is None:
            assert torch.equal(shard.target, plain[name].target), name
            continue
        values, scales = quantize_rows(plain[name].target)
        assert torch.equal(shard.target.view(torch.uint8), values.view(torch.uint8)), name
        assert torch.equal(shard.scales, scales)
        quantized += 1
    assert quantized == 2 * 7
    assert [len(tokens) for tokens in greedy(path, quantization="fp8")] == [TOKENS] * len(PROMPTS)


def refusal(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load(path)
    return str(caught.value)


def test_tensor_without_a_place_in_the_architecture_is_refused(tmp_path: Path) -> None:
    def add_norm(writer: GGUFWriter) -> None:
        writer.add_tensor("blk.1.attn_q_norm.weight", np.ones(64, np.float32))

    path = make_gguf(tmp_path, "llama", edit=add_norm)
    assert "tensor 'blk.1.attn_q_norm.weight' is not used by this architecture" in refusal(path)


def test_missing_and_misshapen_tensors_are_refused(tmp_path: Path) -> None:
    def claim_three_layers(writer: GGUFWriter) -> None:
        del writer.kv_data[0]["llama.block_count"]
        writer.add_block_count(3)

    def claim_more_columns(writer: GGUFWriter) -> None:
        del writer.kv_data[0]["llama.feed_forward_length"]
        writer.add_feed_forward_length(768)

    missing = make_gguf(tmp_path / "a", edit=claim_three_layers)
    assert "does not contain the tensor 'blk.2.attn_q.weight', which the model needs" in refusal(missing)
    wider = make_gguf(tmp_path / "b", edit=claim_more_columns)
    assert "'blk.0.ffn_gate.weight' has shape [512, 256], but the metadata implies [768, 256]" in refusal(
        wider
    )


def test_file_that_shrinks_after_its_header_was_read_is_named_with_the_tensor(tmp_path: Path) -> None:
    path = make_gguf(tmp_path)
    model = build(read_model_config(path), LayerContext(torch.float32, torch.device("cpu")), max_positions=8)
    with GgufCheckpoint(path, head_dim=64) as checkpoint:
        sources = {source.name: source for _, source in checkpoint.locate(model.weight_shards())}
        source = max(sources.values(), key=lambda each: each.tensor.offset)
        with path.open("rb+") as stream:
            stream.truncate(source.tensor.offset + 1)
        with pytest.raises(ModelError, match=rf"tiny-F32\.gguf ends inside of tensor '{source.name}'"):
            source.read_rows(0, source.tensor.shape[0])


def test_permutation_of_the_test_is_that_of_llama_cpp() -> None:
    """In llama.cpp's order, the elements that one angle rotates are neighbours; in ours they are half a head apart."""
    rows = np.arange(16, dtype=np.float32)[:, None]
    assert permute(rows, 2)[:, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]
