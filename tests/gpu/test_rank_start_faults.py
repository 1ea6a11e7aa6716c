"""A rank that fails at its start ends the service soon, with its reason, though others wait for it in a collective."""

import re
import signal
import time
from pathlib import Path
from typing import Any, Final

import pytest
from gpu_memory import check_released, read_free_mib
from gpus import ON_GPU, needs_gpus
from rank_faults import RankFault, plant
from service import Service, running_service, wait_until
from tiny_models import make_model
from watch import Family

from skiff_runtime.contract import EXIT_STARTUP_FAILED, EXIT_USAGE
from skiff_runtime.processes.resolve import count_gpus

pytestmark = [pytest.mark.integration, *([pytest.mark.gpu] if ON_GPU else [])]

TWO_RANKS: Final = ("--tp", "2", "--max-total-tokens", "2048")


def check_failed(service: Service, family: Family | None, reason: str) -> None:
    """Check the exit code, the logged reason, and that nothing is left."""
    assert service.wait_exit() == EXIT_STARTUP_FAILED, service.log_text()
    [logged] = re.findall(r"service_failed reason=\"(.*)\"", service.log_text())
    assert re.search(reason, logged), logged
    assert family is None or family.left() == []


@needs_gpus(2)
def test_missing_shard_of_the_checkpoint_is_named(tmp_path: Path) -> None:
    model = make_model(tmp_path)
    missing = sorted(model.glob("model-*.safetensors"))[1]
    missing.unlink()
    with running_service(model, *TWO_RANKS, ready=False) as service:
        check_failed(service, None, rf"rank\d exited with code 1: .*{re.escape(missing.name)}")
        assert "Traceback" not in service.log_text()


@needs_gpus(2)
def test_rank_out_of_memory_ends_the_start(tmp_path: Path) -> None:
    """The other rank waits for it in a collective. The KV cache is too large for memory that was freed before."""
    free = read_free_mib()
    fault = plant(tmp_path / "fault", 1, RankFault.NO_MEMORY)
    with running_service(
        make_model(tmp_path / "model"),
        "--tp",
        "2",
        "--max-total-tokens",
        str(1 << 18),
        ready=False,
        environment=fault.environment,
    ) as service:
        wait_until(lambda: "rank1" in service.children)
        family = Family.of(service)
        check_failed(service, family, r"rank1 exited with code 1" + (": out of memory" if ON_GPU else ""))
        check_released(free)


@needs_gpus(2)
@pytest.mark.parametrize("dies", [True, False])
def test_rank_that_does_not_join_the_others(tmp_path: Path, dies: bool) -> None:
    """A dead rank is noticed at once; one that only hangs, after ``--startup-timeout-seconds``."""
    fault = plant(tmp_path / "fault", 1, RankFault.LATE)
    limit = () if dies else ("--startup-timeout-seconds", "15")
    model = make_model(tmp_path / "model")
    with running_service(model, *TWO_RANKS, *limit, ready=False, environment=fault.environment) as service:
        wait_until(lambda: all(f"process=rank{rank} phase=config" in service.log_text() for rank in (0, 1)))
        family = Family.of(service)
        if dies:
            service.children["rank1"].send_signal(signal.SIGKILL)
        check_failed(
            service, family, "rank1 was killed by SIGKILL" if dies else "not ready within 15 s: rank0, rank1"
        )


@needs_gpus(2)
def test_slow_start_is_no_silence(tmp_path: Path) -> None:
    """A rank sends no heartbeat until it is ready, for longer than the limit on its silence."""
    fault = plant(tmp_path / "fault", 1, RankFault.LATE)
    flags = (*TWO_RANKS, "--rank-heartbeat-timeout-seconds", "2")
    with running_service(
        make_model(tmp_path / "model"), *flags, ready=False, environment=fault.environment
    ) as service:
        wait_until(lambda: "process=rank1 phase=config" in service.log_text())
        time.sleep(5)
        assert service.process.poll() is None
        fault.begin()
        wait_until(lambda: "service_ready" in service.log_text(), 60)


def test_too_few_gpus_are_refused_before_any_process_starts(tmp_path: Path) -> None:
    found = count_gpus()
    ranks = next(tp for tp in (1, 2, 4, 8, 16) if tp > found)
    heads: dict[str, Any] = {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 16}
    model = make_model(tmp_path, **heads)
    with running_service(model, "--device", "cuda", "--tp", str(ranks), ready=False) as service:
        assert service.wait_exit() == EXIT_USAGE
        message = f"--device cuda with --tp {ranks} needs {ranks} GPUs; this machine shows {found}"
        assert message in service.log_text()
        assert "processes_started" not in service.log_text()
