"""``skiff info``: its sizes equal the engine's; its input and its errors."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import make_config
from fake_hub import running_hub
from fp8_checkpoints import COMPRESSED
from gguf_models import make_gguf
from quantized_formats import FORMATS
from tiny_models import FAMILIES, make_model

from skiff_runtime.attention.workspace import GATHER_WORKSPACE_BYTES
from skiff_runtime.distributed.tensor_parallel import TensorParallelGroup
from skiff_runtime.info.memory_fit import LIBRARY_BYTES, Gpu, estimate_memory, fit_gpu
from skiff_runtime.kernels.constants import DEQUANTIZED_BYTES
from skiff_runtime.kvcache.kv_pool import KVLayout, plan_capacity
from skiff_runtime.layers.sharding import LayerContext
from skiff_runtime.models.config import read_model_config
from skiff_runtime.models.footprint import count_parameters, kv_bytes_per_token
from skiff_runtime.models.registry import make_model as build

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
QWEN2_7B = {
    **LLAMA_8B,
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
}
QWEN3_600M = {
    **LLAMA_8B,
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "head_dim": 128,
    "tie_word_embeddings": True,
}


QWEN3_30B_A3B = {
    **LLAMA_8B,
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
MIXTRAL_8X7B = {
    **LLAMA_8B,
    "architectures": ["MixtralForCausalLM"],
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


def info(*flags: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "skiff_runtime", "info", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def describe(directory: Path, config: dict[str, Any]) -> str:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (LLAMA_8B, 8_030_261_248),
        (QWEN2_7B, 7_615_616_512),
        (QWEN3_600M, 596_049_920),
        (QWEN3_30B_A3B, 30_532_122_624),
        (MIXTRAL_8X7B, 46_702_792_704),
    ],
    ids=["llama 3.1 8B", "qwen 2.5 7B", "qwen3 0.6B", "qwen3 30B-A3B", "mixtral 8x7B"],
)
def test_published_models_have_the_published_number_of_parameters(
    tmp_path: Path, config: dict[str, Any], parameters: int
) -> None:
    assert count_parameters(read_model_config(Path(describe(tmp_path, config)))).total == parameters


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_equal_those_of_the_engine(tmp_path: Path, family: str, ranks: int) -> None:
    model = read_model_config(make_model(tmp_path, family))
    context = LayerContext(torch.float16, torch.device("meta"), TensorParallelGroup(0, ranks))
    built = build(model, context, max_positions=1)
    assert 2 * count_parameters(model, ranks).total == built.weight_bytes()
    layout = KVLayout(model.num_layers, built.heads.local_kv_heads(ranks), model.head_dim, 16, torch.float16)
    assert 16 * kv_bytes_per_token(model, ranks, 2) == layout.page_bytes


def test_kv_cache_equals_that_of_the_engine(tmp_path: Path) -> None:
    model = read_model_config(Path(describe(tmp_path, LLAMA_8B)))
    config = make_config(tmp_path, max_total_tokens=None, device="cuda", dtype="bfloat16", max_model_len=8192)
    need = estimate_memory(config, model, "bfloat16")
    found = fit_gpu(config, need, Gpu("one", 80 << 30))
    pages = plan_capacity(
        config,
        KVLayout(32, 8, 128, config.page_size, torch.bfloat16),
        free_bytes=(80 << 30) - LIBRARY_BYTES - need.weight_bytes,
        reserved_bytes=need.working_bytes,
        max_model_len=8192,
    )
    assert found.fits and found.kv_tokens == pages * config.page_size > 300_000
    assert not fit_gpu(config, need, Gpu("small", 15 << 30)).fits


@pytest.mark.parametrize("quantization", ["none", "fp8", "auto"])
def test_cpu_needs_working_memory_for_float32_copies(tmp_path: Path, quantization: Any) -> None:
    """Attention gathers K and V, and an FP8 matrix (by flag or by checkpoint) is dequantized to float32."""
    changes = {"quantization_config": COMPRESSED} if quantization == "auto" else {}
    model = read_model_config(Path(describe(tmp_path, LLAMA_8B | changes)))
    config = make_config(tmp_path, quantization=quantization, dtype="bfloat16", max_model_len=1024)
    gpu, cpu = (
        estimate_memory(replace(config, device=device), model, "bfloat16").working_bytes
        for device in ("cuda", "cpu")
    )
    gathered = 2 * 1024 * 8 * 128 * 2
    assert cpu - gpu == 2 * GATHER_WORKSPACE_BYTES - gathered + (
        0 if quantization == "none" else 4 * 28672 * 4096
    )


@pytest.mark.parametrize(("dtype", "element_bytes"), [("bfloat16", 2), ("float32", 4)])
def test_cpu_needs_working_memory_to_dequantize_integers(
    tmp_path: Path, dtype: Any, element_bytes: int
) -> None:
    """A part has ``DEQUANTIZED_BYTES`` in the model's dtype, and five matrices of its size are in float32."""
    changes = {"quantization_config": FORMATS["awq"].config}
    model = read_model_config(Path(describe(tmp_path, LLAMA_8B | changes)))
    config = make_config(tmp_path, dtype=dtype, max_model_len=1024)
    gpu, cpu = (
        estimate_memory(replace(config, device=device), model, dtype).working_bytes
        for device in ("cuda", "cpu")
    )
    gathered = 2 * 1024 * 8 * 128 * element_bytes
    steps = 5 * 4 * (DEQUANTIZED_BYTES // element_bytes)
    assert cpu - gpu == 2 * GATHER_WORKSPACE_BYTES - gathered + steps - DEQUANTIZED_BYTES


@pytest.mark.parametrize(
    ("name", "method", "bytes_each", "index_bytes"),
    [
        ("block-fp8", "fp8", 1 + 4 / (128 * 128), 0),
        ("tensor-fp8-static", "fp8", 1, 0),
        ("compressed-int4", "compressed-tensors", 0.5 + 2 / 128, 0),
        ("awq", "awq", 0.5 + 4 / 128, 0),
        ("gptq-desc-act", "gptq", 0.5 + 2 / 32, 4),
    ],
)
def test_quantized_checkpoint_shows_its_method_and_its_bytes(
    tmp_path: Path, name: str, method: str, bytes_each: float, index_bytes: int
) -> None:
    """``bytes_each`` are those of a weight with its part of a scale, ``index_bytes`` those of an input's index in the order."""
    path = describe(tmp_path, LLAMA_8B | {"quantization_config": FORMATS[name].config})
    model = read_model_config(Path(path))
    need = estimate_memory(make_config(tmp_path, dtype="bfloat16"), model, "bfloat16")
    matrices = 32 * 4096 * (4096 * 2 + 1024 * 2 + 14336 * 3)
    others = need.parameters.total - matrices
    inputs = 32 * (4096 * 6 + 14336)  # of q, k, v, o, gate and up, and of down
    expected = matrices * bytes_each + inputs * index_bytes
    assert need.weight_bytes - 2 * others == pytest.approx(expected, rel=1e-3)
    shown = info(path, "--max-model-len", "8192")
    assert shown.returncode == 0 and f"weights in {method} and bfloat16" in shown.stdout, shown.stderr
    report = json.loads(info(path, "--json").stdout)
    assert report["quantization"] == method and report["config"]["weight_format"] is not None


def test_tables_and_json_show_sizes_and_fit(tmp_path: Path) -> None:
    path = describe(tmp_path, LLAMA_8B)
    shown = info(path, "--max-model-len", "8192")
    assert shown.returncode == 0, shown.stderr
    assert "8.03 billion" in shown.stdout and "14.96 GiB" in shown.stdout and "128 KiB" in shown.stdout
    assert "1 GiB" in shown.stdout  # one full context of 8,192 tokens
    small = info(path, "--gpu", "L4", "--dtype", "float32")
    assert small.returncode == 1 and "no" in small.stdout and "H100" not in small.stdout
    fp8 = info(path, "--gpu", "H100", "--quantization", "fp8", "--max-model-len", "8192")
    assert "weights in fp8 and bfloat16" in fp8.stdout and "8.463 GiB" in fp8.stdout
    two_ranks = json.loads(info(path, "--tp", "2", "--gpu-memory", "24", "--json").stdout)
    assert two_ranks["each_rank"]["kv_bytes_per_token"] == 64 << 10
    assert two_ranks["parameters"]["total"] == 8_030_261_248 and two_ranks["gpus"][0]["fits"]
    assert two_ranks["quantization"] == "none" and two_ranks["config"]["unquantized"] == []


def test_windows_and_scaled_context_are_shown(tmp_path: Path) -> None:
    """A decode step reads no more than the windows, whereas the cache holds the whole context."""
    mistral = {**LLAMA_8B, "architectures": ["MistralForCausalLM"], "sliding_window": 4096}
    path = describe(tmp_path, {**mistral, "max_position_embeddings": 32768, "rope_scaling": None})
    shown = info(path)
    assert shown.returncode == 0, shown.stderr
    assert "4,096 tokens in 32 of 32 layers" in shown.stdout
    found = json.loads(info(path, "--json").stdout)
    assert found["config"]["sliding_windows"] == [4096] * 32
    assert found["each_rank"]["kv_bytes_read_at_max_model_len"] == 4096 * (128 << 10)
    assert found["each_rank"]["kv_bytes_for_max_model_len"] == 32768 * (128 << 10)
    short = info(path, "--max-model-len", "4096").stdout
    assert "sliding window" not in short and "of which a step reads" not in short
    yarn = '{"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 32768}'
    scaled = info(path, "--rope-scaling", yarn)
    assert "131,072 tokens (YaRN: 4 times 32,768)" in scaled.stdout


def test_gguf_file_is_described_by_its_metadata(tmp_path: Path) -> None:
    path = make_gguf(tmp_path, "qwen3", "Q4_K")
    found = json.loads(info(str(path), "--json", "--gpu", "L4").stdout)
    original = json.loads(info(str(tmp_path / "hf"), "--json", "--gpu", "L4", "--dtype", "bfloat16").stdout)
    assert found["architecture"] == "Qwen3ForCausalLM" and found["dtype"] == "bfloat16"
    for key in ("parameters", "each_rank", "gpus"):
        assert found[key] == original[key]
    path.write_bytes(path.read_bytes()[:-1])
    damaged = info(str(path))
    assert damaged.returncode == 2 and "tiny-Q4_K.gguf is truncated or corrupt" in damaged.stderr


def test_experts_and_active_parameters_are_shown(tmp_path: Path) -> None:
    path = describe(tmp_path, QWEN3_30B_A3B)
    shown = info(path, "--max-model-len", "8192")
    assert shown.returncode == 0, shown.stderr
    assert "8 of 128 for each token, in 48 layers" in shown.stdout
    assert "30.5 billion" in shown.stdout and "3.35 billion for each token" in shown.stdout
    flags = ("--tp", "4", "--expert-parallel", "--quantization", "fp8", "--json")
    found = json.loads(info(path, *flags).stdout)
    assert found["parameters"]["total"] == 30_532_122_624 and found["parameters"]["active"] == 3_353_032_704
    assert found["config"]["moe"]["num_experts"] == 128
    columns = json.loads(info(path, "--tp", "4", *flags[3:]).stdout)
    # Each rank has the scales of down-projections of all experts instead of a quarter of them, 2,048 each.
    more = columns["each_rank"]["weight_bytes"] - found["each_rank"]["weight_bytes"]
    assert more == 4 * 48 * 2048 * (128 - 128 // 4)
    assert (
        "--expert-parallel is for mixtures" in info(describe(tmp_path, LLAMA_8B), "--expert-parallel").stderr
    )


def test_only_the_configuration_of_a_hub_model_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(tmp_path / "hub" / "acme" / "tiny", "qwen3")
    with running_hub(tmp_path / "hub") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        done = info("hf://acme/tiny", "--download-dir", str(tmp_path / "cache"))
        names = {seen.path.rsplit("/", 1)[-1] for seen in hub.seen if "/resolve/" in seen.path}
    assert done.returncode == 0, done.stderr
    assert "Qwen3ForCausalLM" in done.stdout
    assert names == {"config.json", "generation_config.json"}
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("demo://", "--tp", "3"), "--tp 3 does not divide"),
        (("demo://", "--max-model-len", "9999"), "--max-model-len 9999 exceeds the 2048 positions"),
        (("demo://", "--rope-scaling", "{}"), "--rope-scaling: 'rope_type' must be 'yarn', not 'default'"),
        (("demo://", "--gpu", "Abacus"), "--gpu"),
        (("demo://", "--gpu-memory", "-1"), "--gpu-memory"),
        (("/nowhere",), "/nowhere does not exist"),
    ],
)
def test_invalid_input_is_named(flags: tuple[str, ...], complaint: str) -> None:
    done = info(*flags)
    assert done.returncode == 2 and complaint in done.stderr and len(done.stderr.splitlines()) == 1


def test_info_does_not_import_torch() -> None:
    code = "import sys, skiff_runtime.__main__ as m; m.main(['info', 'demo://']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0
