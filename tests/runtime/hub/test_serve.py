"""A server downloads a model from a hub once, and then needs no hub."""

import subprocess
import sys
from pathlib import Path

import pytest
from fake_hub import running_hub
from tiny_models import make_model

from skiff_runtime.config import Config
from skiff_runtime.processes.local_server import LocalServer
from skiff_runtime.processes.resolve import resolve


def test_server_downloads_a_hub_model_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(tmp_path / "hub" / "acme" / "tiny")
    cache = tmp_path / "cache"
    flags = ["--model", "hf://acme/tiny", "--download-dir", str(cache)]
    with running_hub(tmp_path / "hub") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        with LocalServer([*flags, "--max-total-tokens", "4096", "--cpu-threads", "1"]) as server:
            assert "fetch_finished" in server.log_text()
            chat = [sys.executable, "-m", "skiff_runtime", "chat", "--url", server.url, "--model", "tiny"]
            greedy = ["--temperature", "0", "--max-tokens", "4"]
            asked = subprocess.run(
                [*chat, *greedy], input="hello\n", capture_output=True, text=True, timeout=120
            )
            assert asked.returncode == 0, asked.stderr
            assert asked.stdout.strip()
    _, model = resolve(Config(model="hf://acme/tiny", download_dir=str(cache)))
    assert model.path.parent == cache / "models--acme--tiny" / "snapshots"
