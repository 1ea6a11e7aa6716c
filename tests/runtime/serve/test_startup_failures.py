"""Starts that fail, or are called off: one clear error that says what to change, an exit code, nothing left behind."""

import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from service import running_service, wait_until
from tiny_models import make_model

from skiff_runtime.contract import EXIT_OK, EXIT_STARTUP_FAILED, EXIT_USAGE


def cut_weights(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def no_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()


def break_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").write_text('{"model": ')


def break_config(model: Path) -> None:
    (model / "config.json").write_text("{")


def leave(_model: Path) -> None:
    """The model is fine."""


@pytest.mark.parametrize(
    ("spoil", "flags", "code", "says"),
    [
        (leave, ["--page-size", "x"], EXIT_USAGE, "--page-size must be a whole number, not 'x'"),
        (leave, ["--max-model-len", "100000"], EXIT_USAGE, "--max-model-len 100000 exceeds"),
        (leave, ["--tp", "3"], EXIT_USAGE, "--tp 3 does not divide"),
        (break_config, [], EXIT_USAGE, "config.json is not valid JSON"),
        (cut_weights, [], EXIT_STARTUP_FAILED, "model.safetensors is truncated or corrupt"),
        (no_weights, [], EXIT_STARTUP_FAILED, "holds no weights"),
        (break_tokenizer, [], EXIT_STARTUP_FAILED, "tokenizer.json cannot be read as a tokenizer"),
        (leave, ["--max-total-tokens", "1000000000000"], EXIT_STARTUP_FAILED, "MiB are free; lower it"),
        (leave, ["--host", "192.0.2.1"], EXIT_STARTUP_FAILED, "choose another --host or --port"),
    ],
)
def test_what_cannot_be_served_is_named(
    tmp_path: Path, spoil: Callable[[Path], None], flags: list[str], code: int, says: str
) -> None:
    model = make_model(tmp_path, shard_size="10MB")
    spoil(model)
    with running_service(model, *flags, ready=False) as service:
        assert service.wait_exit() == code
        assert says in service.log_text()
        assert "Traceback" not in service.log_text()


def test_each_phase_of_each_rank_is_logged_once_as_it_begins(tmp_path: Path) -> None:
    with running_service(make_model(tmp_path), "--tp", "2") as service:
        text = service.log_text()
    [served] = re.findall(r" service_ready .*seconds=(\S+)", text)
    for rank in ("rank0", "rank1"):
        told = re.findall(rf" supervisor phase_begun process={rank} phase=(\w+) seconds=(\S+)", text)
        assert [phase for phase, _ in told] == ["config", "weights", "kv_cache", "warmup"]
        told += re.findall(rf" supervisor (process_ready) process={rank} seconds=(\S+)", text)
        seconds = [0.0, *(float(each) for _, each in told), float(served)]
        assert len(told) == 5 and seconds == sorted(seconds)


def test_a_child_that_dies_during_the_start_ends_it(tmp_path: Path) -> None:
    with running_service(make_model(tmp_path), ready=False) as service:
        wait_until(lambda: "process=api" in service.log_text())
        service.children["rank0"].kill()
        assert service.wait_exit() == EXIT_STARTUP_FAILED
        assert re.search(r"service_failed reason=\"rank0 was killed by SIGKILL", service.log_text())


def test_a_start_that_is_called_off_ends_well(tmp_path: Path) -> None:
    with running_service(make_model(tmp_path), ready=False) as service:
        wait_until(lambda: "processes_started" in service.log_text())
        service.process.send_signal(signal.SIGTERM)
        assert service.wait_exit() == EXIT_OK
        assert "Traceback" not in service.log_text()
