"""The command ``skiff info``: its flags, its tables and its JSON."""

import argparse
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import msgspec
import rich.box
from rich.console import Console
from rich.table import Table

from skiff_runtime.config import AUTO, Config
from skiff_runtime.config.arguments import add_config_arguments, build_config
from skiff_runtime.contract import EXIT_FAILURE, EXIT_OK
from skiff_runtime.errors import ConfigError
from skiff_runtime.hub.fetch import choose_hub_cache, fetch_config
from skiff_runtime.hub.hub_reference import SCHEME, parse_reference
from skiff_runtime.info.memory_fit import GPUS, Gpu, GpuFit, MemoryNeed, estimate_memory, fit_gpu
from skiff_runtime.layers.rope_scaling import YarnScaling
from skiff_runtime.models.config import ModelConfig, check_tp_size, read_model_config
from skiff_runtime.models.footprint import count_active_parameters, num_sparse_layers
from skiff_runtime.processes.resolve import locate
from skiff_runtime.sources.fetch import find_fetched
from skiff_runtime.sources.source_reference import is_source_uri

DESCRIPTION: Final = """\
Show a model's shape, the memory that each part of it takes on each rank, and the number
of tokens of KV cache that fit beside it on a GPU. All of it follows from config.json,
or from the metadata of a GGUF file: of an hf:// model nothing else is downloaded (its
GGUF file must be in the cache), and no GPU is needed."""
EPILOG: Final = """\
The engine computes the same sizes when it starts; the memory of the driver and of
libraries is assumed (1 GiB). With --gpu or --gpu-memory the exit code is 1 if the model
does not fit.

examples:
  skiff info hf://Qwen/Qwen3-0.6B
  skiff info hf://meta-llama/Llama-3.1-70B-Instruct --tp 4 --gpu H100
  skiff info /models/llama --max-model-len 8192 --gpu-memory 24 --json
"""
_CONFIG_FLAGS: Final = (
    "revision",
    "download_dir",
    "dtype",
    "quantization",
    "max_model_len",
    "rope_scaling",
    "tp_size",
    "expert_parallel",
    "max_running_requests",
    "max_num_batched_tokens",
    "page_size",
    "kv_cache_dtype",
    "mem_fraction_static",
)
_NOT_SHAPE: Final = ("path", "tokenizer_path", "architecture")
GIB: Final = 1 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``skiff info``, including those of ``skiff serve`` that change the sizes."""
    parser.description = DESCRIPTION
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("model", metavar="MODEL", help="a directory or GGUF file, hf://org/name or demo://")
    parser.add_argument("--json", action="store_true", help="print JSON, with all sizes in bytes")
    target = parser.add_mutually_exclusive_group()
    target.add_argument(
        "--gpu",
        choices=[gpu.name for gpu in GPUS],
        metavar="NAME",
        help="a GPU: %(choices)s (default: all of them)",
    )
    target.add_argument("--gpu-memory", type=_gib, metavar="GIB", help="a GPU with this much memory")
    every = tuple(Config.__dataclass_fields__)
    add_config_arguments(parser, skip=tuple(name for name in every if name not in _CONFIG_FLAGS))


def run(arguments: argparse.Namespace) -> int:
    """Print the tables or the JSON, and return the exit code. Raises ``ConfigError`` and ``FetchError``."""
    config = build_config(arguments)
    model = _read_model(config)
    check_tp_size(model, config.tp_size, expert_parallel=config.expert_parallel)
    if config.max_model_len is not None and config.max_model_len > model.max_position_embeddings:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} exceeds the {model.max_position_embeddings} positions "
            "of the model; --rope-scaling extends them"
        )
    dtype = model.dtype if config.dtype == AUTO else config.dtype
    need = estimate_memory(config, model, dtype)
    fits = [fit_gpu(config, need, gpu) for gpu in _gpus(arguments)]
    if arguments.json:
        report = _as_json(config, model, dtype, need, fits)
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    else:
        _print_tables(config, model, dtype, need, fits)
    is_gpu_given = arguments.gpu is not None or arguments.gpu_memory is not None
    return EXIT_FAILURE if is_gpu_given and not fits[0].fits else EXIT_OK


def _read_model(config: Config) -> ModelConfig:
    """Read the model's configuration; that of an ``hf://`` model outside of the cache is downloaded to a temporary file."""
    if is_source_uri(config.model):
        cache = choose_hub_cache(config.download_dir)
        fetched = find_fetched(config.model, cache)
        if fetched is None:
            raise ConfigError(f"{config.model} is not in {cache}; download it first (skiff fetch)")
        return _read_config(fetched, config)
    if not config.model.startswith(SCHEME):
        return _read_config(locate(config), config)
    reference = parse_reference(config.model, config.revision)
    cache = choose_hub_cache(config.download_dir)
    with TemporaryDirectory(prefix="skiff-info-") as temporary:
        path = fetch_config(reference, cache, Path(temporary))
        return _read_config(path, config)


def _read_config(path: Path, config: Config) -> ModelConfig:
    return read_model_config(path, max_model_len=config.max_model_len, rope_scaling=config.rope_scaling)


def _gpus(arguments: argparse.Namespace) -> list[Gpu]:
    if arguments.gpu_memory is not None:
        return [Gpu(f"{arguments.gpu_memory:g} GiB", int(arguments.gpu_memory * GIB))]
    return [gpu for gpu in GPUS if arguments.gpu in (None, gpu.name)]


def _as_json(
    config: Config, model: ModelConfig, dtype: str, need: MemoryNeed, fits: list[GpuFit]
) -> dict[str, Any]:
    shape = asdict(model)
    return {
        "model": config.model,
        "architecture": model.architecture,
        "config": {name: value for name, value in shape.items() if name not in _NOT_SHAPE},
        "parameters": {
            **asdict(need.parameters),
            "total": need.parameters.total,
            "active": count_active_parameters(model),
        },
        "dtype": dtype,
        "quantization": need.quantization,
        "tp": config.tp_size,
        "max_model_len": need.max_model_len,
        "each_rank": {
            "weight_bytes": need.weight_bytes,
            "kv_bytes_per_token": need.kv_bytes_per_token,
            "kv_bytes_for_max_model_len": need.kv_bytes_for_max_model_len,
            "kv_bytes_read_at_max_model_len": need.kv_bytes_read_at_max_model_len,
            "working_bytes": need.working_bytes,
        },
        "gpus": [
            {
                "name": each.gpu.name,
                "memory_bytes": each.gpu.memory_bytes,
                "fits": each.fits,
                "kv_tokens": each.kv_tokens,
                "full_length_requests": each.full_length_requests,
            }
            for each in fits
        ],
    }


def _print_tables(
    config: Config, model: ModelConfig, dtype: str, need: MemoryNeed, fits: list[GpuFit]
) -> None:
    parts = need.parameters
    by_part = ", ".join(f"{name} {_count(value)}" for name, value in asdict(parts).items() if value)
    heads = f"{model.num_heads} heads of {model.head_dim}, {model.num_kv_heads} of them for K and V"
    kinds = dtype if need.quantization == "none" else f"{need.quantization} and {dtype}"
    ranks = "" if config.tp_size == 1 else f" (each of {config.tp_size} ranks)"
    rows = [
        ("model", f"{config.model}, {model.architecture}"),
        ("shape", f"{model.num_layers} layers of {model.hidden_size}, {heads}"),
        ("vocabulary", f"{model.vocab_size:,} tokens"),
        ("context", f"{need.max_model_len:,} tokens{_describe_yarn(model)}"),
        *_window_rows(model),
        *_expert_rows(model),
        ("parameters", f"{_count(parts.total)}: {by_part}"),
        (f"weights in {kinds}", _size(need.weight_bytes) + ranks),
        ("KV cache for a token", _size(need.kv_bytes_per_token) + ranks),
        ("KV cache for full context", _size(need.kv_bytes_for_max_model_len) + ranks),
        *_read_rows(need, ranks),
        ("working memory, up to", _size(need.working_bytes) + ranks),
    ]
    console = Console(highlight=False)
    console.print(_table(("", ""), rows, "left"))
    lines = [(each.gpu.name, _size(each.gpu.memory_bytes), *_fit_columns(each)) for each in fits]
    title = "GPU" if config.tp_size == 1 else f"{config.tp_size} GPUs"
    console.print(_table((title, "memory", "fits", "tokens of KV cache", "at full length"), lines, "right"))


def _describe_yarn(model: ModelConfig) -> str:
    scaling = model.rope_scaling
    if not isinstance(scaling, YarnScaling):
        return ""
    return f" (YaRN: {scaling.factor:g} times {scaling.original_max_position_embeddings:,})"


def _window_rows(model: ModelConfig) -> list[tuple[str, str]]:
    """Return a row for each size of sliding windows."""
    return [
        ("sliding window", f"{window:,} tokens in {count} of {model.num_layers} layers")
        for window, count in Counter(model.sliding_windows).items()
        if window is not None
    ]


def _read_rows(need: MemoryNeed, ranks: str) -> list[tuple[str, str]]:
    """Return the row of what a decode step reads of a full context, if windows make it less than the whole."""
    read = need.kv_bytes_read_at_max_model_len
    return [] if read == need.kv_bytes_for_max_model_len else [("of which a step reads", _size(read) + ranks)]


def _expert_rows(model: ModelConfig) -> list[tuple[str, str]]:
    """Return the row about experts and the number of parameters that a token takes; none for a dense model."""
    if model.moe is None:
        return []
    experts = (
        f"{model.moe.top_k} of {model.moe.num_experts} for each token, in {num_sparse_layers(model)} layers"
    )
    return [
        ("experts", experts),
        ("active parameters", f"{_count(count_active_parameters(model))} for each token"),
    ]


def _fit_columns(found: GpuFit) -> tuple[str, str, str]:
    if not found.fits:
        return "no", "-", "-"
    return "yes", f"{found.kv_tokens:,}", f"{found.full_length_requests:,.1f} requests"


def _table(heads: tuple[str, ...], rows: list[Any], justify: Any) -> Table:
    table = Table(box=rich.box.SIMPLE_HEAD if any(heads) else None, show_header=any(heads))
    for index, head in enumerate(heads):
        # Long values wrap, but not what a line is about.
        table.add_column(head, justify="left" if index == 0 else justify, no_wrap=index == 0)
    for row in rows:
        table.add_row(*row)
    return table


def _count(number: int) -> str:
    for unit, size in (("billion", 1e9), ("million", 1e6), ("thousand", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)


def _size(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} bytes"


def _gib(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1 << 20:
        raise argparse.ArgumentTypeError(f"must be a number of GiB above 0, not {text!r}")
    return value
