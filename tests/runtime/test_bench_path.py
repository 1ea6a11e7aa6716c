"""``skiff bench path``: real front processes, a stub of rank 0, and figures that can be true."""

import json
import subprocess
import sys
from pathlib import Path

import psutil

LOADS = [
    "--requests",
    "40",
    "--streams",
    "8",
    "--output-len",
    "20",
    "--long-prompts",
    "1",
    "--long-input-len",
    "2000",
    "--step-ms",
    "20",
]


def test_it_measures_every_process_and_leaves_none_behind(tmp_path: Path) -> None:
    output = tmp_path / "path.json"
    command = [sys.executable, "-m", "skiff_runtime", "bench", "path", *LOADS, "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "tokens/s" in done.stdout
    figures = json.loads(output.read_text())
    assert sorted(figures["rss_mib"]) == ["api", "detokenizer", "tokenizer0"]
    assert figures["requests"]["us"]["tokenizer0"] > 10
    assert figures["streams"]["us"]["api"] > 0.1
    assert sorted(figures["scheduler_us"]) == ["1", "256", "64"]
    assert min(figures["scheduler_us"].values()) > 1
    assert figures["streams"]["count"] == 8 * 20
    assert figures["streams"]["age_ms"]["count"] <= 8 * 20
    assert 0 < figures["streams"]["tokens_per_second"] <= 8 * 1000 / 20 * 1.2, "no more than the steps allow"
    assert not [each for each in psutil.process_iter(["cmdline"]) if _is_stub(each.info["cmdline"])]


def _is_stub(words: list[str] | None) -> bool:
    return words is not None and "skiff_runtime.bench.path.stub_rank" in words
