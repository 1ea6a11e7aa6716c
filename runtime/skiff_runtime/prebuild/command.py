"""``skiff prebuild``: compiles the GPU kernels of a model where an image is built, without a GPU.

Triton's kernels are those that the engine launches when it runs its steps on fake tensors. FlashInfer's prefill is
compiled if ``--attention-backend`` names it, or if the choice is automatic and nvcc is there; that takes a minute.
"""

import argparse
import os
import re
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Final, cast

from skiff_runtime import log
from skiff_runtime.config import AUTO, Config, Dtype
from skiff_runtime.config.arguments import add_config_arguments, build_config
from skiff_runtime.contract import EXIT_OK, FLAG_KERNEL_CACHE_DIR
from skiff_runtime.errors import ConfigError
from skiff_runtime.kernels import kernel_cache
from skiff_runtime.layers.weight_format import choose_weight_format
from skiff_runtime.models.config import ModelConfig
from skiff_runtime.processes.resolve import resolve

_USED_FIELDS: Final = (
    "download_dir",
    "revision",
    "dtype",
    "quantization",
    "max_model_len",
    "rope_scaling",
    "tp_size",
    "expert_parallel",
    "attention_backend",
    "kernel_cache_dir",
    "max_running_requests",
    "max_num_batched_tokens",
    "page_size",
    "kv_cache_dtype",
    "enable_lora",
    "max_loras",
    "max_lora_rank",
)
_FLASHINFER: Final = "flashinfer"
_ARCHITECTURES_VARIABLE: Final = "FLASHINFER_CUDA_ARCH_LIST"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags, among them those of ``skiff serve`` that decide which kernels are launched."""
    parser.add_argument(
        "--model-config",
        required=True,
        metavar="MODEL",
        help="a directory with config.json, hf://org/name, or shape://name; no weights are read",
    )
    parser.add_argument(
        "--arch",
        type=_parse_architecture,
        default="9.0a",
        metavar="X.Y",
        help="compute capability to compile for (default: 9.0a, that of H100 and H200)",
    )
    every = tuple(Config.__dataclass_fields__)
    add_config_arguments(parser, skip=tuple(name for name in every if name not in _USED_FIELDS))


def run(arguments: argparse.Namespace) -> int:
    """Fill the kernel cache; return the exit code."""
    config = build_config(arguments, model=arguments.model_config, load_format="dummy", device="cpu")
    log.configure("prebuild", config.log_level)
    resolved, model = resolve(config)
    resolved = replace(resolved, dtype=cast(Dtype, model.dtype) if config.dtype == AUTO else config.dtype)
    assert resolved.kernel_cache_dir is not None
    directory = Path(resolved.kernel_cache_dir)
    directory.mkdir(parents=True, exist_ok=True)
    if not os.access(directory, os.W_OK):
        raise ConfigError(f"{FLAG_KERNEL_CACHE_DIR} {directory} cannot be written to; use another directory")
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="skiff-") as scratch:
        kernel_cache.activate(directory, Path(scratch))
        _compile_triton(resolved, model, arguments.arch)
        if _needs_flashinfer(resolved):
            _compile_flashinfer(resolved, model, arguments.arch, directory)
    log.event("kernels_built", directory=str(directory), seconds=f"{time.monotonic() - started:.1f}")
    return EXIT_OK


def _compile_triton(config: Config, model: ModelConfig, architecture: str) -> None:
    from skiff_runtime.engine.fp8_support import check_fp8_support
    from skiff_runtime.prebuild.ahead_of_time import compile_ahead_of_time
    from skiff_runtime.prebuild.launcher_cache import build_launchers, stub_libcuda

    major, minor = map(int, re.findall(r"\d+", architecture))
    weight_format = choose_weight_format(config.quantization, model.weight_format)
    check_fp8_support(config, weight_format, (major, minor))
    with stub_libcuda():
        build_launchers(compile_ahead_of_time(config, model, major * 10 + minor))


def _needs_flashinfer(config: Config) -> bool:
    if config.attention_backend != AUTO:
        return _FLASHINFER in config.attention_backend
    is_16_bit = config.kv_cache_dtype == AUTO and config.dtype in ("bfloat16", "float16")
    if not is_16_bit or find_spec(_FLASHINFER) is None:
        return False
    if not _has_nvcc():
        log.event("flashinfer_left_out", reason="there is no nvcc in $CUDA_HOME, $PATH or /usr/local/cuda")
        return False
    return True


def _has_nvcc() -> bool:
    """Return whether there is an nvcc where FlashInfer looks for it."""
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    return shutil.which("nvcc") is not None or any(
        (Path(root) / "bin" / "nvcc").is_file() for root in roots if root
    )


def _compile_flashinfer(config: Config, model: ModelConfig, architecture: str, directory: Path) -> None:
    """Compile each of FlashInfer's prefill kernels that the model needs: with a sliding window, without, or both.

    Raises ``ConfigError`` if ``directory`` does not take them.
    """
    os.environ[_ARCHITECTURES_VARIABLE] = architecture
    import torch

    from skiff_runtime.kernels.flashinfer_internals import gen_batch_prefill_module

    kernel_cache.use_prebuilt_flashinfer_modules()
    dtype, head_dim = getattr(torch, config.dtype), model.head_dim
    parameters = (dtype, dtype, dtype, torch.int32, head_dim, head_dim)
    has_window = dict.fromkeys(window is not None for window in model.sliding_windows)
    modules = [
        gen_batch_prefill_module(backend, *parameters, 0, each, False, False)
        for backend in (("fa3", "fa2") if architecture.startswith("9.0") else ("fa2",))
        for each in has_window
    ]
    missing = [module for module in modules if not module.is_aot]
    with ThreadPoolExecutor(len(modules)) as pool:  # each module is built by a ninja of its own
        for built in [pool.submit(module.build, verbose=False) for module in missing]:
            built.result()
    kept = {path.stem for path in (directory / kernel_cache.FLASHINFER_FOLDER).rglob("*.so")}
    if lost := [module.name for module in missing if module.name not in kept]:
        raise ConfigError(f"{directory} did not take FlashInfer's {lost[0]}; free space there")


def _parse_architecture(text: str) -> str:
    if not re.fullmatch(r"\d+\.\d[af]?", text):
        raise ConfigError(f"--arch must be a compute capability such as 9.0a, not {text!r}")
    return text
