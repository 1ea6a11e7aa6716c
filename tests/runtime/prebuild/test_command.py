"""``skiff prebuild``: kernels are compiled without a GPU, and found in the kernel cache."""

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
from compiling import run_compiling
from quantized_formats import FORMATS
from tiny_models import edit_json, make_model

from skiff_runtime.kernels import kernel_cache

pytest.importorskip("triton", reason="builds of torch for CPUs may come without Triton")


def prebuild(
    model: Path, directory: Path, *flags: str, **variables: str
) -> "subprocess.CompletedProcess[str]":
    command = ["-m", "skiff_runtime", "prebuild", "--model-config", str(model)]
    command += ["--kernel-cache-dir", str(directory), "--dtype", "bfloat16", "--max-running-requests", "1"]
    return run_compiling(*command, *flags, variables=variables)


def kernels(directory: Path) -> list[str]:
    return sorted(path.stem for path in (directory / kernel_cache.TRITON_FOLDER).glob("*/*.cubin"))


SHAPE: Final[dict[str, Any]] = {
    "hidden_size": 256,
    "head_dim": 64,
    "intermediate_size": 384,
    "num_hidden_layers": 1,
}
"""Of all models here, so that what does not differ between formats is compiled once."""
BLOCK_FP8: Final = (
    "block_fp8_gemv_kernel",
    "block_fp8_stream_k_kernel",
    "block_fp8_gemm_kernel",
    "quantize_groups_kernel",
    "silu_and_mul_quantize_groups_kernel",
    "add_rms_norm_quantize_groups_kernel",
)
INT4: Final = ("int4_gemv_kernel", "int4_stream_k_kernel", "dequantize_int4_kernel")


QUANTIZED: Final[dict[str, tuple[str, ...]]] = {
    "block-fp8": BLOCK_FP8,
    "compressed-tensor-fp8-static": ("quantize_static_kernel",),
    "awq": INT4,
}
"""The kernels that only this format has."""
BUILDS: Final = """
import sys
from skiff_runtime.__main__ import main

for model in sys.argv[3:]:
    print("model", model, file=sys.stderr)
    assert main(["prebuild", "--model-config", model, *sys.argv[1].split(), sys.argv[2]]) == 0
"""


@dataclass(frozen=True)
class Build:
    """A finished build, and the kernels in its directory at that time: others are built into it later."""

    model: Path
    directory: Path
    stderr: str
    kernels: list[str]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """The kernels of a model of one layer in FP8."""
    folder = tmp_path_factory.mktemp("build")
    model = make_model(folder / "model", "qwen3", **SHAPE)
    done = prebuild(model, folder / "kernels", "--quantization", "fp8")
    assert done.returncode == 0, done.stderr
    return Build(model, folder / "kernels", done.stderr, kernels(folder / "kernels"))


@pytest.fixture(scope="module")
def compiled(build: Build, tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The kernels that are compiled for each format, by one process and into the directory of ``build``."""
    folder = tmp_path_factory.mktemp("quantized")
    for name in QUANTIZED:
        model = make_model(folder / name, "qwen3", **SHAPE)
        edit_json(model / "config.json", quantization_config=FORMATS[name].config)
    flags = "--dtype bfloat16 --max-running-requests 1 --kernel-cache-dir"
    models = [str(folder / name) for name in QUANTIZED]
    done = run_compiling("-c", BUILDS, flags, str(build.directory), *models)
    assert done.returncode == 0, done.stderr
    written = set(kernels(build.directory))
    found = {}
    for part in re.split("^model ", done.stderr, flags=re.MULTILINE)[1:]:
        found[Path(part.splitlines()[0]).name] = set(re.findall(r"kernel_compiled kernel=(\w+) ", part))
    assert set().union(*found.values()) <= written
    return found


@pytest.mark.matrix
@pytest.mark.parametrize("name", QUANTIZED)
def test_kernels_of_quantized_checkpoints_are_compiled(compiled: dict[str, set[str]], name: str) -> None:
    assert set(QUANTIZED[name]) <= compiled[name], compiled[name]


def test_every_kernel_of_a_step_is_compiled_once(build: Build) -> None:
    """A second run compiles nothing, and a rank of two over an FP8 KV cache only what differs for it."""
    model, directory, found = build.model, build.directory, build.kernels
    assert sorted(re.findall(r"kernel_compiled kernel=(\w+) seconds=", build.stderr)) == found
    for name in (
        "decode_attention_kernel",
        "prefill_attention_kernel",
        "qk_norm_rope_store_kv_kernel",
        "prepare_inputs_kernel",
        "sample_blocks_kernel",
        "preloading_fp8_gemv_kernel",
        "quantize_kernel",
    ):
        assert name in found
    for name in ("add_rms_norm_quantize_kernel", "silu_and_mul_quantize_kernel"):
        assert name in found
    for name in (
        "chunk_maxima_kernel",
        "partial_sums_kernel",
        "gather_candidates_kernel",
        "find_thresholds_kernel",
        "sample_tokens_kernel",
    ):
        assert name in found
    for name in ("count_tokens_kernel", "apply_penalties_kernel", "apply_token_bitmask_kernel"):
        assert name in found
    assert_links(directory)
    written = times(directory)
    again = prebuild(model, directory, "--quantization", "fp8")
    assert again.returncode == 0 and "kernel_compiled" not in again.stderr
    assert times(directory) == written
    rank = prebuild(model, directory, "--quantization", "fp8", "--kv-cache-dtype", "fp8_e4m3", "--tp", "2")
    assert rank.returncode == 0, rank.stderr
    compiled = re.findall(r"kernel_compiled kernel=(\w+) seconds=", rank.stderr)
    assert "decode_attention_kernel" in compiled and "sample_tokens_kernel" not in compiled


def times(directory: Path) -> dict[Path, int]:
    return {
        path: path.stat().st_mtime_ns for kind in ("cubin", "so") for path in directory.rglob(f"*.{kind}")
    }


def assert_links(directory: Path) -> None:
    """Check that launchers are compiled, too, and need the driver's library by its name on a GPU machine."""
    libraries = list(directory.rglob("*.so"))
    assert {path.name.split(".")[0] for path in libraries} == {"cuda_utils", "__triton_launcher"}
    for path in libraries:
        needed = {part for part in path.read_bytes().split(b"\0") if part.startswith(b"libcuda")}
        assert needed == {b"libcuda.so.1"}


@pytest.mark.parametrize("compiler", ["/nowhere/cc", "/bin/false"])
def test_missing_or_failing_compiler_is_named(tmp_path: Path, compiler: str) -> None:
    done = prebuild(make_model(tmp_path / "model"), tmp_path / "kernels", CC=compiler)
    assert done.returncode == 2 and compiler in done.stderr and "python3-dev" in done.stderr
    assert not kernels(tmp_path / "kernels")


def test_unsupported_tp_size_is_refused(tmp_path: Path) -> None:
    done = prebuild(make_model(tmp_path / "model"), tmp_path / "kernels", "--tp", "3")
    assert done.returncode == 2 and "--tp 3 does not divide" in done.stderr


def test_invalid_architecture_is_refused(tmp_path: Path) -> None:
    done = prebuild(tmp_path, tmp_path, "--arch", "hopper")
    assert done.returncode == 2 and "--arch must be a compute capability" in done.stderr


def test_fp8_is_refused_for_gpus_without_it(tmp_path: Path) -> None:
    flags = ("--arch", "8.6", "--quantization", "fp8", "--kv-cache-dtype", "fp8_e4m3")
    done = prebuild(make_model(tmp_path / "model"), tmp_path / "kernels", *flags)
    assert done.returncode == 2 and "need compute capability 8.9 or more" in done.stderr, done.stderr
    assert not kernels(tmp_path / "kernels")


KEYS = """
import sys
from skiff_runtime.kernels.triton.runtime import cache_keys as keys
from skiff_runtime.kernels.triton.attention.decode_attention import decode_attention_kernel, shared_prefix_attention_kernel

settled = keys.compute_cache_keys()
asked = (decode_attention_kernel, shared_prefix_attention_kernel) if sys.argv[1] == "rows" else (shared_prefix_attention_kernel, decode_attention_kernel)
assert {each.cache_key for each in asked} < set(settled.values())
print(*(f"{each.__name__} {each.cache_key}" for each in asked), *settled.items(), sep="\\n")
"""


def test_cache_keys_do_not_depend_on_the_order_of_launches() -> None:
    """A start launches the largest step first, and ahead-of-time compilation the smallest."""
    printed = []
    for first in ("rows", "prefixes"):
        done = run_compiling("-c", KEYS, first, timeout_seconds=60)
        assert done.returncode == 0, done.stderr
        printed.append(sorted(done.stdout.splitlines()))
    assert printed[0] == printed[1] and len(printed[0]) > 40


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE"):
        monkeypatch.setenv(name, "unset")


@pytest.mark.usefixtures("variables")
def test_read_only_cache_is_copied_and_new_kernels_go_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image, scratch = tmp_path / "image", tmp_path / "scratch"
    (image / "triton" / "KEY").mkdir(parents=True)
    (image / "triton" / "KEY" / "k.cubin").write_bytes(b"code")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != image)  # root may write anywhere
    kernel_cache.activate(image, scratch)
    assert os.environ["TRITON_CACHE_DIR"] == str(scratch / "triton")
    assert (scratch / "triton" / "KEY" / "k.cubin").read_bytes() == b"code"
    assert os.environ["FLASHINFER_WORKSPACE_BASE"] == str(scratch / "flashinfer")
