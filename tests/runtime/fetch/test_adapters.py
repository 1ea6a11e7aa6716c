"""`skiff fetch` of a LoRA adapter, and the directory in which a server finds it."""

import json
from pathlib import Path

import pytest
from fake_hub import running_hub

from skiff_runtime.__main__ import main
from skiff_runtime.config import Config
from skiff_runtime.processes.adapter_files import locate_start_adapters

URI = "hf://acme/sql"


def test_an_adapter_is_fetched_and_found_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "hub" / "acme" / "sql"
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8}))
    (folder / "adapter_model.safetensors").write_bytes(b"\0" * 5_000)
    cache = tmp_path / "cache"
    with running_hub(tmp_path / "hub") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        assert main(["fetch", "--model", URI, "--download-dir", str(cache)]) == 0
    path = Path(capsys.readouterr().out.strip().splitlines()[-1])
    assert {each.name for each in path.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    # Models may lie elsewhere, where the server cannot write.
    config = Config(
        model="demo://", lora=(f"sql={URI}",), download_dir="/model", lora_download_dir=str(cache)
    )
    (found,) = locate_start_adapters(config)
    assert (found.name, found.uri, found.path) == ("sql", URI, str(path))
    (beside,) = locate_start_adapters(Config(model="demo://", lora=(f"sql={URI}",), download_dir=str(cache)))
    assert beside.path == str(path)
