"""Capacity of the KV cache, free memory, and the errors when something does not fit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import make_config, make_engine
from tiny_models import make_model

from skiff_runtime.engine import model_runner
from skiff_runtime.engine.free_memory import host_free_bytes
from skiff_runtime.errors import ConfigError
from skiff_runtime.kvcache.kv_pool import KVLayout, plan_capacity

LAYOUT = KVLayout(layers=4, kv_heads=2, head_dim=64, page_size=16, dtype=torch.bfloat16)
MIB = 1 << 20


def capacity(*, free: int, reserved: int = 0, **changes: Any) -> int:
    config = make_config(Path("model"), **{"max_total_tokens": None, **changes})
    return plan_capacity(config, LAYOUT, free_bytes=free, reserved_bytes=reserved, max_model_len=1000)


def test_page_bytes_count_k_and_v_of_all_layers() -> None:
    assert LAYOUT.page_bytes == 2 * 4 * 16 * 2 * 64 * 2


def test_explicit_number_of_tokens_is_exact() -> None:
    assert capacity(free=64 * MIB, max_total_tokens=1000) == 62
    with pytest.raises(ConfigError, match=r"--max-total-tokens 100000 takes .* MiB are free"):
        capacity(free=64 * MIB, max_total_tokens=100_000)


def test_memory_fraction_applies_to_free_memory() -> None:
    pages = capacity(free=64 * MIB, reserved=8 * MIB, mem_fraction_static=0.5, device="cuda")
    assert pages == 24 * MIB // LAYOUT.page_bytes - 1


def test_cpu_allocates_no_more_than_running_requests_can_fill() -> None:
    assert capacity(free=1 << 40, max_running_requests=3) == 3 * 63


def test_error_for_too_little_memory_names_the_flags() -> None:
    with pytest.raises(
        ConfigError, match=r"no room for a KV cache.*--mem-fraction-static.*--max-num-batched-tokens"
    ):
        capacity(free=MIB, reserved=MIB)


def test_weights_that_cannot_fit_are_refused_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_model(tmp_path, "llama")
    monkeypatch.setattr(model_runner, "free_bytes", lambda device: 100_000)
    with pytest.raises(ConfigError, match=r"the weights take 0\.5\d+ MiB on each rank in float32"):
        make_engine(path)


def test_kv_cache_that_cannot_fit_is_refused_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_model(tmp_path, "llama")
    monkeypatch.setattr(model_runner, "load_weights", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(ConfigError, match=r"--max-total-tokens \d+ takes .* MiB are free"):
        make_engine(path, max_total_tokens=1 << 40)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    write(tmp_path / "proc/meminfo", "MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
    write(tmp_path / "proc/self/cgroup", "")
    return tmp_path


def test_free_memory_of_the_machine(machine: Path) -> None:
    assert host_free_bytes(machine) == 8000 * 1024
    assert host_free_bytes() > 0


def test_free_memory_within_cgroup_v2_limits(machine: Path) -> None:
    write(machine / "proc/self/cgroup", "0::/pod/container\n")
    for name, limit, used, cache in [("pod", "5000000", 1_000_000, 1000), ("pod/container", "max", 1, 0)]:
        group = machine / "sys/fs/cgroup" / name
        write(group / "memory.max", limit)
        write(group / "memory.current", str(used))
        write(group / "memory.stat", f"anon 1\ninactive_file {cache}\n")
    assert host_free_bytes(machine) == 4_001_000


def test_free_memory_within_cgroup_v1_limit_of_a_container(machine: Path) -> None:
    """The path in /proc is the host's and is not mounted; the mounted root is the container's group."""
    write(machine / "proc/self/cgroup", "5:cpu:/\n4:memory:/kubepods/x\n0::/\n")
    group = machine / "sys/fs/cgroup/memory"
    write(group / "memory.limit_in_bytes", "3000000\n")
    write(group / "memory.usage_in_bytes", "1000000\n")
    write(group / "memory.stat", "cache 5\ntotal_inactive_file 400000\n")
    assert host_free_bytes(machine) == 2_400_000
