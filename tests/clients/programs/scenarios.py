"""The frame of a client's program: what it is given, and the report of what it did.

It runs in the client's own virtual environment, so it imports nothing but the standard library.
"""

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence

DEMO_URL = os.environ["SKIFF_DEMO_URL"]
"""A service of the demo model ``skiff-demo``."""
TOOLS_URL = os.environ["SKIFF_TOOLS_URL"]
"""A service of the memorizing model ``skiff-tools``, which calls tools."""
DEMO = "skiff-demo"
TOOLS = "skiff-tools"
API_KEY = "none"
QUESTION = "What is a pod?"
ANSWER = "pod"
"""A word of the demo model's answer."""
WEATHER_QUESTION = "What is the weather in Paris?"
WEATHER = "18 degrees"
"""Result of the weather tool."""
WEATHER_ANSWER = "It is 18 degrees in Paris."
"""The model's answer to this result of the tool, and to no other."""
COMMAND_SECONDS = 150


def check(condition: object, found: object) -> None:
    """Fail the scenario with what was found unless ``condition`` is true."""
    if not condition:
        raise AssertionError(f"found {found!r}")


def run_command(
    command: Sequence[str], environment: Mapping[str, str] | None = None, directory: str = "."
) -> str:
    """Run a command line client, and return what it printed; fail with it if the client fails."""
    done = subprocess.run(
        command,
        env={**os.environ, **(environment or {})},
        cwd=directory,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=COMMAND_SECONDS,
    )
    printed = f"{done.stdout}\n{done.stderr}"
    check(done.returncode == 0, f"exit code {done.returncode}: {printed[-4000:]}")
    return printed


def run_scenarios(*scenarios: Callable[[], None]) -> None:
    """Run every scenario, report each as a line of JSON, and exit with 1 if one of them failed."""
    failed = False
    for scenario in scenarios:
        error = None
        try:
            scenario()
        except BaseException:  # the report's boundary: every end of a scenario is one of its results
            error = traceback.format_exc()
        failed = failed or error is not None
        print("\n" + json.dumps({"scenario": scenario.__name__, "error": error}), flush=True)
    sys.exit(failed)
