"""Other people's clients, unmodified, against ``skiff serve``: what a user does first, a tool round trip, streaming.

README.md describes the suite. A client that cannot be installed fails, and so does a program that ends without
reporting all of its scenarios.
"""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from client_environments import CLIENTS, Client, Environments, read_clients

ALL, ENVIRONMENTS = read_clients()
PROGRAM_SECONDS = 400


@pytest.mark.clients
@pytest.mark.timeout(1500)  # the first one trains the model, and each may be installed first
@pytest.mark.parametrize("client", ALL, ids=lambda client: client.name)
def test_client(
    client: Client,
    servers: dict[str, str],
    home: dict[str, str],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    reported, output = run_program(client, ENVIRONMENTS, {**servers, **home}, tmp_path)
    passed = [name for name, error in reported.items() if error is None]
    missing = [name for name in client.scenarios if name not in passed]
    line = f"{client.name:<18}{client.version:<12}passed: {', '.join(passed)}"
    record_property("client", line + (f"; failed: {', '.join(missing)}" if missing else ""))
    failures = "\n".join(f"--- {name}\n{error}" for name, error in reported.items() if error)
    assert not failures, f"{client.name} {client.version}:\n{failures}"
    assert list(reported) == list(client.scenarios), f"the program ended early:\n{output[-4000:]}"


def run_program(
    client: Client, environments: Environments, variables: dict[str, str], directory: Path
) -> tuple[dict[str, str | None], str]:
    """Install the client and run its program. Return the error of each scenario, None if it passed, and the output."""
    command, path = environments.command(client)
    done = subprocess.run(
        command,
        env={**os.environ, **variables, **path},
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PROGRAM_SECONDS,
    )
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"scenario"')]
    return {report["scenario"]: report["error"] for report in reports}, done.stdout


def test_every_program_belongs_to_a_client() -> None:
    frames = {"scenarios.py", "scenarios.mjs"}
    programs = {path.name for path in (CLIENTS / "programs").iterdir() if path.is_file()}
    assert programs - frames == {client.program for client in ALL}


def test_every_version_is_exact() -> None:
    pinned = json.loads((CLIENTS / "package.json").read_text())["dependencies"]
    loose = [requirement for client in ALL for requirement in client.packages if "==" not in requirement]
    assert not loose
    assert not [name for client in ALL for name in client.npm if name not in pinned]
    assert not [version for version in pinned.values() if not version[0].isdigit()]
