"""Resolution of the configuration: find the model and derive every option left open, before any weight is read."""

import itertools
import os
from dataclasses import replace
from pathlib import Path
from typing import Final, cast

from skiff_runtime import demo, shapes
from skiff_runtime.config import AUTO, Config, Device, Dtype, Quantization
from skiff_runtime.config.api_keys import read_api_keys
from skiff_runtime.config.cache_dirs import default_cache_dir, tokenizer_cache_dirs
from skiff_runtime.conversion.tokenizer_json import find_or_convert_tokenizer
from skiff_runtime.errors import ConfigError, ModelError
from skiff_runtime.gguf.header import SUFFIX, is_gguf
from skiff_runtime.gguf.selection import find_gguf
from skiff_runtime.hub.fetch import choose_hub_cache
from skiff_runtime.layers.weight_format import Fp8Format
from skiff_runtime.models.config import ModelConfig, check_tp_size, read_model_config
from skiff_runtime.sources.fetch import fetch_model, is_remote

DEMO_NAME: Final = "skiff-demo"
_DEMO: Final = "demo://"
_FILE: Final = "file://"
_SCHEME: Final = "://"
WATCHDOG_SECONDS: Final = {"cpu": 600.0, "cuda": 120.0}
"""Default of ``--watchdog-timeout`` by device: several times the longest step that is no hang.

A CPU may need minutes for a large model's chunk of 2,048 tokens. A GPU needs some ten seconds for 16,384 tokens of a 70B
model, and as long for the compilation of a kernel that was not prebuilt.
"""
RANK_HEARTBEAT_SECONDS: Final = {"cpu": 60.0, "cuda": 10.0}
"""Default of ``--rank-heartbeat-timeout-seconds`` by device: on a CPU a rank's main loop shares the cores with its engine
and with the other ranks."""

CPU_LORAS_PER_SLOT: Final = 4
"""Default of ``--max-cpu-loras``, for each of ``--max-loras``."""


def resolve(config: Config) -> tuple[Config, ModelConfig]:
    """Find the model, and derive every field of ``config`` that is left open.

    Downloads an ``hf://`` model and converts its tokenizer if needed. Raises ``ConfigError``, ``ModelError`` or
    ``FetchError`` with a message that names what to change.
    """
    if config.model.startswith(shapes.SCHEME) and config.load_format != "dummy":
        raise ConfigError(f"--model {config.model} is a shape without weights; add --load-format dummy")
    # Only checked here, so that a wrong file ends the start early: the api process reads it, now and when it changes.
    for path, flag in (
        (config.api_key_file, "--api-key-file"),
        (config.admin_api_key_file, "--admin-api-key-file"),
    ):
        if path is not None:
            read_api_keys(path, flag)
    model = read_model_config(
        locate(config), max_model_len=config.max_model_len, rope_scaling=config.rope_scaling
    )
    model = replace(
        model, tokenizer_path=find_or_convert_tokenizer(model.path, tokenizer_cache_dirs(config.download_dir))
    )
    _check_pooling(config, model)
    chat_template = _find_chat_template(config)
    if config.load_format == "safetensors" and is_gguf(model.path):
        raise ConfigError(f"--load-format safetensors: {model.path} is a GGUF file; omit the option")
    device = _choose_device(config)
    check_tp_size(model, config.tp_size, expert_parallel=config.expert_parallel)
    _check_all_reduce(config, device)
    resolved = replace(
        config,
        device=device,
        dtype=_choose_dtype(config, model, device),
        quantization=choose_quantization(config, model),
        max_model_len=_choose_max_model_len(config, model),
        chat_template=chat_template,
        served_model_name=config.served_model_name or _default_name(config.model),
        kernel_cache_dir=config.kernel_cache_dir or str(default_cache_dir() / "kernels"),
        cpu_threads=config.cpu_threads or max(1, available_cores() // config.tp_size),
        rank_heartbeat_timeout_seconds=config.rank_heartbeat_timeout_seconds
        or RANK_HEARTBEAT_SECONDS[device],
        watchdog_timeout=config.watchdog_timeout or WATCHDOG_SECONDS[device],
        enable_lora=config.enable_lora or bool(config.lora),
        max_cpu_loras=config.max_cpu_loras or CPU_LORAS_PER_SLOT * config.max_loras,
    )
    return resolved, model


def available_cores() -> int:
    """Return the cores that this process may use: its CPU affinity, limited by the cgroup's quota; at least 1."""
    cores = len(os.sched_getaffinity(0))
    quota = _cgroup_cores()
    return max(1, min(cores, int(quota))) if quota else cores


def locate(config: Config) -> Path:
    """Return the model's directory or GGUF file. A model of a hub, an object store or a registry is downloaded if needed."""
    uri = config.model
    if uri == _DEMO:
        return demo.DIRECTORY
    if uri.startswith(shapes.SCHEME):
        return shapes.find(uri)
    if is_remote(uri):
        return fetch_model(uri, config.revision, choose_hub_cache(config.download_dir))
    if config.revision is not None:
        raise ConfigError(f"--revision is for hf:// models; --model is {uri}")
    if uri.startswith(_FILE):
        return find_gguf(Path(uri.removeprefix(_FILE)))
    if _SCHEME in uri:
        raise ConfigError(
            f"--model {uri}: unknown scheme; give a directory, file:///path, hf://org/name, s3://bucket/prefix, "
            "gs://bucket/prefix, oci://registry/repository:tag, shape://name or demo://"
        )
    return find_gguf(Path(uri))


def _find_chat_template(config: Config) -> str | None:
    """Return the absolute path of the user's chat template, which must compile; None if there is none."""
    if config.chat_template is None:
        return None
    # Imported here because jinja2 takes 2 MiB, which most supervisors save.
    from skiff_runtime.vocabulary.chat_template import ChatTemplate
    from skiff_runtime.vocabulary.tokenizer_files import read_template

    path = Path(config.chat_template).absolute()
    try:
        template = ChatTemplate(read_template(path), {})
    except ModelError as error:
        raise ConfigError(f"--chat-template: {error}") from None
    if not template.is_usable:
        raise ConfigError(f"--chat-template {path}: {template.fault}")
    return str(path)


def _default_name(uri: str) -> str:
    if uri == _DEMO:
        return DEMO_NAME
    path = uri.partition(_SCHEME)[2] or uri
    if uri.startswith("oci://"):
        path = path.partition("@")[0]
    return path.rstrip("/").rpartition("/")[2].removesuffix(SUFFIX) or "model"


def count_gpus(devices: Path = Path("/dev")) -> int:
    """Return the number of GPUs that CUDA shows to this process: the device files, as ``CUDA_VISIBLE_DEVICES`` limits them.

    An entry that occurs twice ends the list, as one that names no GPU: CUDA shows each GPU at most once.
    """
    files = len(list(devices.glob("nvidia[0-9]*")))
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None or not files:
        return files
    entries = [entry.strip() for entry in listed.split(",")]
    fresh = (_names_gpu(entry, files) and entry not in entries[:at] for at, entry in enumerate(entries))
    return len(list(itertools.takewhile(bool, fresh)))


def _names_gpu(entry: str, files: int) -> bool:
    """Return whether an entry of ``CUDA_VISIBLE_DEVICES`` names a GPU, by index or UUID; CUDA stops at one that does not."""
    return int(entry) < files if entry.isdecimal() else entry.startswith(("GPU-", "MIG-"))


def _choose_device(config: Config) -> Device:
    gpus = count_gpus()
    device: Device = config.device if config.device != AUTO else "cuda" if gpus else "cpu"
    if device == "cuda" and gpus < config.tp_size:
        raise ConfigError(
            f"--device cuda with --tp {config.tp_size} needs {config.tp_size} GPUs; this machine shows {gpus}"
        )
    return device


def _check_all_reduce(config: Config, device: Device) -> None:
    if config.all_reduce == AUTO:
        return
    if device != "cuda":
        raise ConfigError(f"--all-reduce {config.all_reduce} is for GPUs; the model runs on the CPU")
    if config.tp_size == 1:
        raise ConfigError(
            f"--all-reduce {config.all_reduce} needs several ranks; add --tp, or omit the option"
        )


def _check_pooling(config: Config, model: ModelConfig) -> None:
    """Raise ``ConfigError`` for a model that can only embed, if it would not do even that as its files say."""
    if not model.embedding_only:
        return
    if model.embedding.unsupported and config.pooling_type == AUTO:
        raise ConfigError(
            f"{model.embedding.unsupported}; --pooling-type last or mean computes embeddings in another way"
        )
    if config.rerank_template not in (AUTO, "none"):
        raise ConfigError(
            f"--rerank-template {config.rerank_template} reads the model's answer, and {model.path} has no output head; "
            "omit the option"
        )


def _choose_dtype(config: Config, model: ModelConfig, device: Device) -> Dtype:
    if config.dtype != AUTO:
        return config.dtype
    own = cast(Dtype, model.dtype)
    return "float32" if device == "cpu" and own == "float16" else own


def choose_quantization(config: Config, model: ModelConfig) -> Quantization:
    """Return the method by which the weights are quantized: the checkpoint's, or FP8 at load.

    ``fp8`` also names any method whose weights are FP8. Raises ``ConfigError`` for another than the checkpoint's.
    """
    own, wanted = model.quantization, config.quantization
    if wanted in (AUTO, own) or (wanted == "fp8" and isinstance(model.weight_format, Fp8Format)):
        return own
    if own != "none":
        raise ConfigError(
            f"--quantization {wanted}: the weights in {model.path} are quantized by the method {own}; omit the option"
        )
    if wanted != "fp8":
        raise ConfigError(
            f"--quantization {wanted}: the weights in {model.path} are not quantized; only fp8 quantizes at load"
        )
    return wanted


def _choose_max_model_len(config: Config, model: ModelConfig) -> int:
    longest = model.max_position_embeddings
    if config.max_model_len is None:
        return longest
    if config.max_model_len > longest:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} exceeds the {longest} positions of this model; --rope-scaling "
            "extends them"
        )
    return config.max_model_len


def _cgroup_cores() -> float | None:
    """Return the cgroup's CPU quota in cores (v2, else v1); None without a limit."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except OSError:
        pass
    try:
        quota_us = int(Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us").read_text())
        period_us = int(Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us").read_text())
    except OSError:
        return None
    return quota_us / period_us if quota_us > 0 else None
