"""The two services of the client suite, and the table of its results."""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from client_environments import CACHE
from service import running_service


@pytest.fixture(scope="session")
def servers() -> Iterator[dict[str, str]]:
    """URLs of the demo model and of the memorizing model, as the variables that programs read."""
    from memorizing_model import make_memorizing_model  # which imports torch and transformers

    with ExitStack() as stack:
        demo = stack.enter_context(running_service("demo://"))
        model = make_memorizing_model(CACHE)
        flags = ("--served-model-name", "skiff-tools", "--tool-call-parser", "hermes")
        tools = stack.enter_context(running_service(model, *flags, "--max-total-tokens", "400000"))
        yield {"SKIFF_DEMO_URL": demo.url, "SKIFF_TOOLS_URL": tools.url}


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """Variables of a user without any settings, whose programs report to no one and look for no updates."""
    return {
        "HOME": str(tmp_path),
        "PWD": str(tmp_path),  # some programs believe it rather than their working directory
        "XDG_CONFIG_HOME": str(tmp_path / ".config"),
        "XDG_DATA_HOME": str(tmp_path / ".local/share"),
        "XDG_CACHE_HOME": str(tmp_path / ".cache"),
        "PYTHONPATH": "",
        "DO_NOT_TRACK": "1",
        "OTEL_SDK_DISABLED": "true",
        "CREWAI_DISABLE_TELEMETRY": "true",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print a line for each client that ran."""
    for reports in (terminalreporter.stats.get(outcome, []) for outcome in ("passed", "failed")):
        for report in reports:
            for name, line in report.user_properties:
                if name == "client":
                    terminalreporter.write_line(line)
