"""Device, number of visible GPUs, and what is derived from them."""

from pathlib import Path

import pytest

from skiff_runtime.config import Config
from skiff_runtime.processes import resolve as module
from skiff_runtime.processes.resolve import count_gpus, resolve


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 4),
        ("", 0),
        ("0", 1),
        ("2,3", 2),
        ("1, 0", 2),
        ("0,9,1", 1),
        ("0,0", 1),
        ("1, 0,1", 2),
        ("-1", 0),
        ("NoDevFiles", 0),
        ("GPU-8f6d,GPU-77aa,", 2),
        ("MIG-1a,MIG-2b", 2),
    ],
)
def test_gpus_are_counted_as_cuda_shows_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, count: int
) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert count_gpus(tmp_path) == count
    assert count_gpus(tmp_path / "none") == 0


@pytest.mark.parametrize(
    ("gpus", "options", "seconds"),
    [(0, {}, 600.0), (1, {}, 120.0), (1, {"device": "cpu"}, 600.0), (1, {"watchdog_timeout": 7.0}, 7.0)],
)
def test_watchdog_timeout_depends_on_the_device(
    monkeypatch: pytest.MonkeyPatch, gpus: int, options: dict[str, object], seconds: float
) -> None:
    monkeypatch.setattr(module, "count_gpus", lambda: gpus)
    assert resolve(Config(**options))[0].watchdog_timeout == seconds  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("gpus", "options", "seconds"),
    [
        (0, {}, 60.0),
        (1, {}, 10.0),
        (1, {"device": "cpu"}, 60.0),
        (1, {"rank_heartbeat_timeout_seconds": 7}, 7),
    ],
)
def test_limit_on_the_silence_of_ranks_depends_on_the_device(
    monkeypatch: pytest.MonkeyPatch, gpus: int, options: dict[str, object], seconds: float
) -> None:
    monkeypatch.setattr(module, "count_gpus", lambda: gpus)
    assert resolve(Config(**options))[0].rank_heartbeat_timeout_seconds == seconds  # type: ignore[arg-type]
