"""`skiff fetch` of a LoRA adapter, and the directory in which a server finds it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_hub import running_hub

URI = "hf://acme/sql"
LOCATE = """
import json, sys
from skiff_runtime.config import Config
from skiff_runtime.processes.adapter_files import locate_start_adapters
cache, uri = sys.argv[1:]
# Models may lie elsewhere, where the server cannot write.
elsewhere = Config(model="demo://", lora=(f"sql={uri}",), download_dir="/model", lora_download_dir=cache)
beside = Config(model="demo://", lora=(f"sql={uri}",), download_dir=cache)
print(json.dumps([[each.name, each.uri, each.path] for one in (elsewhere, beside) for each in locate_start_adapters(one)]))
"""


def start(hub: str, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run Python in a process of its own, since the hub's client reads its environment once."""
    return subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "HF_ENDPOINT": hub},
        capture_output=True,
        text=True,
        timeout=120,
    )


def run(hub: str, *words: str) -> str:
    """Return the last line of what Python prints."""
    done = start(hub, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def test_an_adapter_is_fetched_and_found_there(tmp_path: Path) -> None:
    folder = tmp_path / "hub" / "acme" / "sql"
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8}))
    (folder / "adapter_model.safetensors").write_bytes(b"\0" * 5_000)
    cache = str(tmp_path / "cache")
    with running_hub(tmp_path / "hub") as hub:
        path = run(hub.url, "-m", "skiff_runtime", "fetch", "--model", URI, "--download-dir", cache)
        found = json.loads(run(hub.url, "-c", LOCATE, cache, URI))
    files = {each.name for each in Path(path).iterdir()}
    assert files >= {"adapter_config.json", "adapter_model.safetensors"}
    assert found == [["sql", URI, path]] * 2


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        (("config.json", "model.safetensors"), "has a config.json, as a model has"),
        (("README.md",), "has no adapter_config.json"),
    ],
    ids=["model", "neither"],
)
def test_what_is_no_adapter_is_refused_before_its_download(
    tmp_path: Path, files: tuple[str, ...], reason: str
) -> None:
    folder, cache = tmp_path / "hub" / "acme" / "sql", tmp_path / "cache"
    folder.mkdir(parents=True)
    for name in files:
        (folder / name).write_text("{}")
    fetch = ("-m", "skiff_runtime", "fetch", "--model", URI, "--download-dir", str(cache), "--adapter-only")
    with running_hub(tmp_path / "hub") as hub:
        done = start(hub.url, *fetch)
    assert done.returncode == 2 and f"no adapter found: the top level of the source {reason}" in done.stderr
    assert not [path for path in cache.rglob("*") if path.is_file() and path.stat().st_size]
    done = start("http://127.0.0.1:1", *fetch, "--wait")
    assert done.returncode == 2 and "--adapter-only looks at the source; omit --wait" in done.stderr
