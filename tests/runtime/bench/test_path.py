"""``skiff bench path``: real front-end processes, a stub of rank 0, and plausible figures."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil

MARK = "SKIFF_TEST_STARTED_BY"
LOADS = [
    "--num-prompts",
    "40",
    "--num-streams",
    "8",
    "--output-len",
    "20",
    "--num-long-prompts",
    "1",
    "--long-input-len",
    "2000",
    "--step-ms",
    "20",
]


def test_path_measures_each_process_and_ends_all(tmp_path: Path) -> None:
    output = tmp_path / "path.json"
    command = [sys.executable, "-m", "skiff_runtime", "bench", "path", *LOADS, "--output-json", str(output)]
    environ = {**os.environ, MARK: str(tmp_path)}
    log = tmp_path / "log"
    with log.open("w") as out:  # not a pipe: it would stay open as long as a process is left behind
        done = subprocess.run(command, stdout=out, stderr=out, timeout=120, env=environ)
    assert _left_behind(str(tmp_path)) == []
    assert done.returncode == 0 and "tokens/s" in log.read_text(), log.read_text()
    figures = json.loads(output.read_text())
    assert sorted(figures["rss_mib"]) == ["api", "detokenizer", "tokenizer0"]
    assert figures["requests"]["us"]["tokenizer0"] > 10
    assert figures["streams"]["us"]["api"] > 0.1
    assert sorted(figures["scheduler_us"]) == ["1", "256", "64"]
    assert min(figures["scheduler_us"].values()) > 1
    assert figures["streams"]["count"] == 8 * 20
    assert figures["streams"]["age_ms"]["count"] <= 8 * 20
    assert 0 < figures["streams"]["tokens_per_second"] <= 8 * 1000 / 20 * 1.2, (
        "more tokens than the steps allow"
    )


def _left_behind(mark: str) -> list[psutil.Process]:
    """Kill and return the processes that a command with this mark in its environment has left behind."""
    running = psutil.process_iter(["environ"])
    found = [each for each in running if (each.info["environ"] or {}).get(MARK) == mark]
    for process in found:
        process.kill()
    return found
