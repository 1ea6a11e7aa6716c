"""``skiff prebuild``: kernels are compiled without a GPU, and found in the kernel cache."""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
from compiling import run_compiling
from quantized_formats import FORMATS
from tiny_models import edit_json, make_model

from skiff_runtime.kernels import kernel_cache
from skiff_runtime.prebuild.command import _has_nvcc

pytestmark = pytest.mark.integration

pytest.importorskip("triton", reason="builds of torch for CPUs may come without Triton")


RUNS: Final = """
import json, os, sys, time
from skiff_runtime.__main__ import main

for words, variables in json.loads(sys.argv[1]):
    os.environ.update(variables)
    print("exit code", main(["prebuild", *words]), "at", time.time_ns(), file=sys.stderr)
"""


@dataclass(frozen=True)
class Run:
    """A finished command: its exit code, what it wrote to stderr, and the time of its end."""

    code: int
    stderr: str
    ended_ns: int

    @property
    def compiled(self) -> list[str]:
        """The names of the kernels that were compiled, in order."""
        return re.findall(r"kernel_compiled kernel=(\w+) seconds=", self.stderr)


Command = tuple[list[str], dict[str, str]]
"""The words of a command, and the environment variables that it and the commands after it have."""


def command(model: Path, directory: Path, *flags: str, **variables: str) -> Command:
    words = ["--model-config", str(model), "--kernel-cache-dir", str(directory)]
    return [*words, "--dtype", "bfloat16", "--max-running-requests", "1", *flags], variables


def prebuild(*commands: Command) -> list[Run]:
    """Run commands one after another in one process, which imports torch once."""
    done = run_compiling("-c", RUNS, json.dumps(commands))
    assert done.returncode == 0, done.stderr
    *parts, rest = re.split(r"^exit code (\d+) at (\d+)\n", done.stderr, flags=re.MULTILINE)
    assert len(parts) == 3 * len(commands) and not rest, done.stderr
    runs = zip(parts[::3], parts[1::3], parts[2::3], strict=True)
    return [Run(int(code), stderr, int(ended_ns)) for stderr, code, ended_ns in runs]


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


@dataclass(frozen=True)
class Build:
    """A finished build, and the kernels in its directory at that time: others are built into it later."""

    model: Path
    directory: Path
    run: Run
    kernels: list[str]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """The kernels of a model of one layer in FP8."""
    folder = tmp_path_factory.mktemp("build")
    model = make_model(folder / "model", "qwen3", **SHAPE)
    [run] = prebuild(command(model, folder / "kernels", "--quantization", "fp8"))
    assert run.code == 0, run.stderr
    return Build(model, folder / "kernels", run, kernels(folder / "kernels"))


@pytest.fixture(scope="module")
def compiled(build: Build, tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The kernels that are compiled for each format, by one process and into the directory of ``build``."""
    folder = tmp_path_factory.mktemp("quantized")
    for name in QUANTIZED:
        model = make_model(folder / name, "qwen3", **SHAPE)
        edit_json(model / "config.json", quantization_config=FORMATS[name].config)
    runs = prebuild(*(command(folder / name, build.directory) for name in QUANTIZED))
    assert [run.code for run in runs] == [0] * len(QUANTIZED), runs
    found = {name: set(run.compiled) for name, run in zip(QUANTIZED, runs, strict=True)}
    assert set().union(*found.values()) <= set(kernels(build.directory))
    return found


@pytest.mark.matrix
@pytest.mark.parametrize("name", QUANTIZED)
def test_kernels_of_quantized_checkpoints_are_compiled(compiled: dict[str, set[str]], name: str) -> None:
    assert set(QUANTIZED[name]) <= compiled[name], compiled[name]


REFUSED: Final[dict[str, tuple[tuple[str, ...], dict[str, str], tuple[str, ...]]]] = {
    "missing compiler": ((), {"CC": "/nowhere/cc"}, ("/nowhere/cc", "python3-dev")),
    "failing compiler": ((), {"CC": "/bin/false"}, ("/bin/false", "python3-dev")),
    "tp size": (("--tp", "3"), {}, ("--tp 3 does not divide",)),
    "architecture": (("--arch", "hopper"), {}, ("--arch must be a compute capability",)),
    "fp8": (
        ("--arch", "8.6", "--quantization", "fp8", "--kv-cache-dtype", "fp8_e4m3"),
        {},
        ("need compute capability 8.9 or more",),
    ),
}
"""Flags and variables of commands that compile nothing, and parts of their errors."""


@dataclass(frozen=True)
class LaterRuns:
    """The command of ``build`` again, the times of the files that were there before, and the runs of ``REFUSED``."""

    again: Run
    before: dict[Path, int]
    refused: dict[str, tuple[Run, Path]]
    """Each with its directory."""


@pytest.fixture(scope="module")
def later(build: Build, tmp_path_factory: pytest.TempPathFactory) -> LaterRuns:
    """All in one process, but not in that of ``build``, which has its kernels in memory and would not compile again."""
    folder = tmp_path_factory.mktemp("refused")
    model = make_model(folder / "model")
    places = [folder / name for name in REFUSED]
    commands = [
        command(model, place, *flags, **variables)
        for place, (flags, variables, _) in zip(places, REFUSED.values(), strict=True)
    ]
    before = times(build.directory)
    again, *refused = prebuild(command(build.model, build.directory, "--quantization", "fp8"), *commands)
    return LaterRuns(again, before, dict(zip(REFUSED, zip(refused, places, strict=True), strict=True)))


def test_every_kernel_of_a_step_is_compiled_once(build: Build, later: LaterRuns) -> None:
    """A second run compiles nothing."""
    directory, found = build.directory, build.kernels
    assert sorted(build.run.compiled) == found
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
    again = later.again
    assert (again.code, again.compiled) == (0, []), again.stderr
    assert {path: at for path, at in times(directory).items() if at <= again.ended_ns} == later.before


@pytest.mark.matrix
def test_rank_of_two_over_an_fp8_cache_compiles_only_what_differs_for_it(build: Build) -> None:
    flags = ("--quantization", "fp8", "--kv-cache-dtype", "fp8_e4m3", "--tp", "2")
    [rank] = prebuild(command(build.model, build.directory, *flags))
    assert rank.code == 0, rank.stderr
    assert "decode_attention_kernel" in rank.compiled and "sample_tokens_kernel" not in rank.compiled


@pytest.mark.matrix
@pytest.mark.parametrize("architecture", ["8.0", "8.9", "10.0", "12.0"])
@pytest.mark.parametrize(
    ("family", "weights"),
    [("qwen3", "model"), ("qwen3", "fp8"), ("qwen3", "awq"), ("qwen3_moe", "model"), ("qwen3_moe", "fp8")],
)
def test_kernels_compile_for_other_architectures(
    tmp_path: Path, architecture: str, family: str, weights: str
) -> None:
    """And fit into their memories. Of two layers, since kernels fused with the layer ahead are not in the first one."""
    model = make_model(tmp_path / "model", family, **{**SHAPE, "num_hidden_layers": 2})
    flags = ["--arch", architecture]
    if weights == "fp8":
        flags += ["--quantization", "fp8"]
    elif weights == "awq":
        edit_json(model / "config.json", quantization_config=FORMATS["awq"].config)
    [run] = prebuild(command(model, tmp_path / "kernels", *flags))
    if (architecture, weights) == ("8.0", "fp8"):
        assert run.code == 2 and "weights in fp8 need compute capability 8.9" in run.stderr, run.stderr
        return
    assert run.code == 0, run.stderr
    assert ("add_rms_norm_fp8_gemv_kernel" in run.compiled) is (weights == "fp8")
    assert ("gate_up_kernel" in run.compiled) is (family == "qwen3_moe")
    assert ("int4_gemv_kernel" in run.compiled) is (weights == "awq")


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


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_compiled_is_named(later: LaterRuns, name: str) -> None:
    run, directory = later.refused[name]
    assert run.code == 2, run.stderr
    assert [part for part in REFUSED[name][2] if part not in run.stderr] == [], run.stderr
    assert not kernels(directory)


KEYS = """
import json, os
from skiff_runtime.kernels.triton.runtime import cache_keys as keys
from skiff_runtime.kernels.triton.attention.decode_attention import decode_attention_kernel, shared_prefix_attention_kernel

for asked in (
    (decode_attention_kernel, shared_prefix_attention_kernel),
    (shared_prefix_attention_kernel, decode_attention_kernel),
):
    if os.fork() == 0:  # a process that has not computed any key
        settled = keys.compute_cache_keys()
        asked_keys = {each.__name__: each.cache_key for each in asked}
        assert set(asked_keys.values()) < set(settled.values())
        print(json.dumps([asked_keys, {str(name): key for name, key in settled.items()}], sort_keys=True), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""


def test_nvcc_is_found_where_flashinfer_looks_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert _has_nvcc()


def test_cache_keys_do_not_depend_on_the_order_of_launches() -> None:
    """A start launches the largest step first, and ahead-of-time compilation the smallest."""
    done = run_compiling("-c", KEYS, timeout_seconds=60)
    assert done.returncode == 0, done.stderr
    rows_first, prefixes_first = map(json.loads, done.stdout.splitlines())
    assert rows_first == prefixes_first and len(rows_first[1]) > 40


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
