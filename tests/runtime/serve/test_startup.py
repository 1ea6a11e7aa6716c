"""Startup: phases in the log, and failures with one error that says what to change and an exit code."""

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from service import START_SECONDS, running_service, wait_ready, wait_until
from tiny_models import make_model
from watch import is_alive

from skiff_runtime.contract import EXIT_OK, EXIT_STARTUP_FAILED, EXIT_USAGE, PHASES

pytestmark = pytest.mark.integration


def break_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").write_text('{"model": ')


def break_config(model: Path) -> None:
    (model / "config.json").write_text("{")


def keep(_model: Path) -> None:
    """Change nothing."""


@pytest.mark.parametrize(
    ("damage", "flags", "code", "message"),
    [
        (keep, ["--max-model-len", "100000"], EXIT_USAGE, "--max-model-len 100000 exceeds"),
        (keep, ["--tp", "3"], EXIT_USAGE, "--tp 3 does not divide"),
        (break_config, [], EXIT_USAGE, "config.json is not valid JSON"),
        (break_tokenizer, [], EXIT_STARTUP_FAILED, "tokenizer.json cannot be read as a tokenizer"),
        (keep, ["--max-total-tokens", "1000000000000"], EXIT_STARTUP_FAILED, "MiB are free; lower it"),
        (keep, ["--host", "192.0.2.1"], EXIT_STARTUP_FAILED, "choose another --host or --port"),
    ],
)
def test_startup_failure_names_its_cause(
    tmp_path: Path, damage: Callable[[Path], None], flags: list[str], code: int, message: str
) -> None:
    """The failures are of the supervisor, the tokenizers, a rank, and api; for invalid weights, see ``test_rank_start_faults.py``."""
    model = make_model(tmp_path, shard_size="10MB")
    damage(model)
    with running_service(model, *flags, ready=False) as service:
        assert service.process.wait(START_SECONDS) == code
        assert message in service.log_text()
        assert "Traceback" not in service.log_text()


def test_phases_are_logged_and_timed_ipv6_is_served_and_children_die_with_their_supervisor(
    tmp_path: Path,
) -> None:
    with running_service(make_model(tmp_path), "--tp", "2", "--host", "::1") as service:
        assert service.url.startswith("http://[::1]:")
        seconds_of_phases = service.http.get(service.url + "/server_info").json()["start_phase_seconds"]
        text = service.log_text()
        children = list(service.children.values())
        os.kill(service.process.pid, signal.SIGKILL)
        wait_until(lambda: not any(is_alive(child) for child in children))
    assert len(children) == 5
    assert list(seconds_of_phases) == [phase for phase in PHASES if phase != "ready"]
    [served] = re.findall(r" service_ready .*seconds=(\S+)", text)
    for rank in ("rank0", "rank1"):
        logged = re.findall(rf" supervisor phase_started process={rank} phase=(\w+) seconds=(\S+)", text)
        assert [phase for phase, _ in logged] == ["config", "weights", "kv_cache", "warmup"]
        logged += re.findall(rf" supervisor (process_ready) process={rank} seconds=(\S+)", text)
        seconds = [0.0, *(float(each) for _, each in logged), float(served)]
        assert len(logged) == 5 and seconds == sorted(seconds)


def test_service_is_announced_only_once_requests_are_accepted(tmp_path: Path) -> None:
    """The api process is slow to read the supervisor's message: scripts wait for the line in the log."""
    with running_service(make_model(tmp_path), ready=False) as service:
        wait_until(lambda: "process_ready process=api" in service.log_text())
        service.children["api"].suspend()
        processes = ("rank0", "tokenizer0", "detokenizer")
        wait_until(
            lambda: all(f"process_ready process={name}" in service.log_text() for name in processes),
            START_SECONDS,
        )
        time.sleep(0.5)  # long enough for an announcement that does not wait
        assert "service_ready" not in service.log_text()
        service.children["api"].resume()
        assert service.http.get(wait_ready(service) + "/readyz").status_code == 200


def test_sigterm_during_startup_exits_cleanly(tmp_path: Path) -> None:
    with running_service(make_model(tmp_path), ready=False) as service:
        wait_until(lambda: "processes_started" in service.log_text())
        service.process.send_signal(signal.SIGTERM)
        assert service.wait_exit() == EXIT_OK
        assert "Traceback" not in service.log_text()
