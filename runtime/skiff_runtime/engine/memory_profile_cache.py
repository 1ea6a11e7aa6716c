"""The memory profile cache: profiles of earlier starts on disk, so that a start need not capture graphs to measure them.

An entry is found by everything that the memory may depend on: the model's configuration, all options but those that
concern the server, the rank, the GPU with its driver, and the versions of the libraries. Entries are written whole and
then renamed, checked when they are read, and never trusted alone (``memory_profile``).
"""

import contextlib
import dataclasses
import hashlib
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from skiff_runtime import log
from skiff_runtime.config import Config
from skiff_runtime.engine.graph_memory import MemoryProfile
from skiff_runtime.models.config import ModelConfig
from skiff_runtime.version import __version__

FOLDER: Final = "memory_profiles"
MAX_ENTRIES: Final = 256
"""Beyond this number, the entries that were written first are deleted."""
MAX_ENTRY_BYTES: Final = 1 << 20
_SERVER_GROUP: Final = "Server"
_OTHER_FIELDS: Final = (
    "model",
    "revision",
    "download_dir",
    "served_model_name",
    "kernel_cache_dir",
    "lora",
    "lora_download_dir",
    "disable_deferred_graph_capture",
    "disable_memory_profile_cache",
)
"""Options that no memory depends on, besides those of the server; the model's configuration is part of the key itself."""
_PACKAGES: Final = ("torch", "triton", "flashinfer-python", "flashinfer-jit-cache", "nvidia-nccl-cu13")
_VARIABLES: Final = (
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "CUDA_MODULE_LOADING",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUBLASLT_WORKSPACE_SIZE",
)
"""Environment variables that change what is allocated."""
_DRIVER_FILE: Final = Path("/proc/driver/nvidia/version")


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a file."""

    key: str
    profile: MemoryProfile


class MemoryProfileCache:
    """One rank's entry in the directory of compiled kernels."""

    def __init__(self, directory: Path, key: str, *, max_bytes: int) -> None:
        """``key`` is that of ``describe_start``; no part of a profile can take more than ``max_bytes``, the GPU's memory."""
        self._folder = directory / FOLDER
        self._key = key
        self._max_bytes = max_bytes
        self.path = self._folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"

    def load(self) -> MemoryProfile | None:
        """Return the kept profile; None if there is none, or if its file is damaged or of another start."""
        try:
            if self.path.stat().st_size > MAX_ENTRY_BYTES:
                return None
            entry = msgspec.json.decode(self.path.read_bytes(), type=_Entry)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            log.warning("memory_profile_unreadable", path=str(self.path), reason=str(error))
            return None
        if entry.key != self._key or not self._is_plausible(entry.profile):
            log.warning("memory_profile_unreadable", path=str(self.path), reason="it is of another start")
            return None
        return entry.profile

    def store(self, profile: MemoryProfile) -> None:
        """Keep a profile, in place of any other for this key. Where the directory cannot be written to, do nothing."""
        partial = self.path.with_name(f".partial-{os.getpid()}-{self.path.name}")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._make_room()
            partial.write_bytes(msgspec.json.encode(_Entry(self._key, profile)))
            partial.replace(self.path)
        except OSError as error:
            log.event("memory_profile_not_kept", path=str(self.path), reason=str(error))
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)

    def remove(self) -> None:
        """Forget the kept profile."""
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)

    def _is_plausible(self, profile: MemoryProfile) -> bool:
        graphs = profile.decode_graphs, profile.prefill_graphs
        sizes = [profile.activations, profile.sampling]
        sizes += [size for each in graphs for size in (each.runner, each.largest, each.further, each.count)]
        return all(0 <= size <= self._max_bytes for size in (*sizes, profile.reserved_bytes))

    def _make_room(self) -> None:
        """Delete the oldest files, also partial ones of starts that were killed, so that one more may be written."""
        files = sorted((each.stat().st_mtime, each) for each in self._folder.iterdir() if each.is_file())
        for _, file in files[: max(0, len(files) - MAX_ENTRIES + 1)]:
            file.unlink(missing_ok=True)


def describe_start(
    config: Config, model: ModelConfig, *, tp_rank: int, backend: str, device: torch.device
) -> str:
    """Return the key of a start on a GPU: deterministic JSON of everything that the memory of steps may depend on.

    ``backend`` describes the attention backend, which ``--attention-backend auto`` chooses by what is built.
    """
    properties = torch.cuda.get_device_properties(device)
    gpu = {
        "name": properties.name,
        "total_memory": properties.total_memory,
        "multi_processor_count": properties.multi_processor_count,
        "driver": _read_driver(),
    }
    return encode_key(config, model, tp_rank=tp_rank, backend=backend, gpu=gpu)


def encode_key(config: Config, model: ModelConfig, *, tp_rank: int, backend: str, gpu: dict[str, Any]) -> str:
    """Return the key of a start on the ``gpu`` that these properties describe."""
    key = {
        "options": {
            each.name: getattr(config, each.name)
            for each in dataclasses.fields(config)
            if each.metadata["group"] != _SERVER_GROUP and each.name not in _OTHER_FIELDS
        },
        "model": {
            each.name: getattr(model, each.name)
            for each in dataclasses.fields(model)
            if each.name not in ("path", "tokenizer_path")
        },
        "tp_rank": tp_rank,
        "attention": backend,
        "gpu": gpu,
        "versions": {"skiff": __version__, "cuda": torch.version.cuda, **_find_versions()},
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }
    return msgspec.json.encode(key, order="deterministic").decode()


def _find_versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _read_driver() -> str:
    try:
        return _DRIVER_FILE.read_text().partition("\n")[0]
    except OSError:
        return ""
