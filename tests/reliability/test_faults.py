"""Each process is killed, stopped, slowed and flooded while requests are at every stage: each gets exactly one end."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Final

import pytest
from faults import (
    FLAGS,
    PROCESSES,
    Fault,
    inject,
    is_fatal,
    judge,
    judge_end,
    judge_recovery,
    probe,
)
from service import Service, running_service
from stages import CONTEXT, SERVICE_FLAGS
from tiny_models import make_model
from watch import Family, run_dirs

pytestmark = pytest.mark.integration

ALL: Final = [(process, fault) for process in PROCESSES for fault in Fault]
SURVIVED: Final = [each for each in ALL if not is_fatal(*each)]
FATAL: Final = [each for each in ALL if is_fatal(*each)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), max_position_embeddings=CONTEXT)


def survive(service: Service, process: str, fault: Fault, salt: int) -> None:
    """Inject a fault that the service survives: every request ends, nothing is held, answers stay the same."""
    before = probe(service)
    endings = asyncio.run(inject(service, process, fault, salt=salt))
    print_endings(process, fault, Counter(str(each).partition(" after")[0] for each in endings))
    assert judge(endings, process, fault) == []
    assert judge_recovery(service, before) == []


def fail(service: Service, process: str, fault: Fault, salt: int) -> None:
    """Inject a fault that ends the service: every client gets an error, and nothing is left of the service."""
    probe(service)
    family, others = Family.of(service), run_dirs()
    endings = asyncio.run(inject(service, process, fault, salt=salt))
    print_endings(process, fault, Counter(str(each).partition(" after")[0] for each in endings))
    assert judge(endings, process, fault) == []
    assert judge_end(service, family) == []
    assert family.run_dir.name in others


def print_endings(process: str, fault: Fault, endings: Counter[str]) -> None:
    """Print a summary."""
    print(f"fault: {fault} {process}: {dict(endings)}")


def test_one_survivable_and_one_fatal_fault(model: Path) -> None:
    with running_service(model, "--tp", "2", *SERVICE_FLAGS, *FLAGS) as service:
        probe(service)
        survive(service, "grammar", Fault.KILL, 0)
        fail(service, "tokenizer0", Fault.FLOOD, 1)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_all_survivable_faults(model: Path) -> None:
    with running_service(model, "--tp", "2", *SERVICE_FLAGS, *FLAGS) as service:
        for salt, (process, fault) in enumerate(SURVIVED):
            survive(service, process, fault, salt)


@pytest.mark.soak
@pytest.mark.parametrize(("process", "fault"), FATAL)
def test_all_fatal_faults(model: Path, process: str, fault: Fault) -> None:
    with running_service(model, "--tp", "2", *SERVICE_FLAGS, *FLAGS) as service:
        fail(service, process, fault, 1)
