"""Downloads of LoRA adapters: the files that peft writes, from a hub and from an object store, and no others."""

from pathlib import Path

import pytest
from fake_hub import running_hub
from fake_s3 import running_s3_of_environment

from skiff_runtime.config import Config
from skiff_runtime.errors import ConfigError, FetchError
from skiff_runtime.hub.fetch import fetch
from skiff_runtime.hub.hub_reference import parse_reference
from skiff_runtime.hub.repository import RemoteFile, RepositoryListing
from skiff_runtime.processes.adapter_files import locate_adapter, locate_start_adapters
from skiff_runtime.processes.launch import StartAdapter

SERVED = {"adapter_config.json", "adapter_model.safetensors"}


def write_adapter(folder: Path) -> Path:
    """Write an adapter beside files that serving does not need."""
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8}')
    (folder / "adapter_model.safetensors").write_bytes(b"\0" * 50_000)
    for name in ("README.md", "tokenizer.json", "tokenizer_config.json", "training_args.bin", "optimizer.pt"):
        (folder / name).write_text("{}")
    return folder


def served_files(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir() if path.name != ".skiff.json"}


def test_adapter_of_a_hub_needs_no_config_of_a_model(tmp_path: Path) -> None:
    write_adapter(tmp_path / "hub" / "acme" / "sql")
    with running_hub(tmp_path / "hub") as hub:
        path = fetch(parse_reference("hf://acme/sql"), tmp_path / "cache", endpoint=hub.url)
    assert served_files(path) == SERVED
    assert locate_adapter("hf://acme/sql", str(tmp_path / "cache")) == path  # complete, so without the hub


def test_adapter_of_an_object_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_adapter(tmp_path / "store" / "adapters" / "sql")
    with running_s3_of_environment(tmp_path / "store", monkeypatch):
        path = locate_adapter("s3://adapters/sql", str(tmp_path / "cache"))
    assert served_files(path) == SERVED


def write_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"\0" * 50_000)
    return folder


def files_below(directory: Path) -> list[str]:
    return [path.name for path in directory.rglob("*") if path.is_file() and path.stat().st_size]


def test_a_model_of_a_hub_is_refused_as_an_adapter_before_its_download(tmp_path: Path) -> None:
    write_model(tmp_path / "hub" / "acme" / "llama")
    with running_hub(tmp_path / "hub") as hub:
        reference, cache = parse_reference("hf://acme/llama"), tmp_path / "cache"
        with pytest.raises(
            ConfigError, match=r"hf://acme/llama@main: no adapter found: .* has a config\.json"
        ):
            fetch(reference, cache, endpoint=hub.url, adapter_only=True)
        assert files_below(cache) == []
        assert served_files(fetch(reference, cache, endpoint=hub.url)) == {"config.json", "model.safetensors"}


def test_a_model_of_an_object_store_is_refused_as_an_adapter_before_its_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "store" / "models" / "llama")
    with (
        running_s3_of_environment(tmp_path / "store", monkeypatch),
        pytest.raises(ConfigError, match=r"s3://models/llama: no adapter found: .* has a config\.json"),
    ):
        locate_adapter("s3://models/llama", str(tmp_path / "cache"))
    assert files_below(tmp_path / "cache") == []


def test_adapter_without_safetensors_is_refused_by_name() -> None:
    files = [RemoteFile(name, 1, "") for name in ("adapter_config.json", "adapter_model.bin")]
    with pytest.raises(FetchError, match=r"no adapter_model\.safetensors"):
        RepositoryListing("commit", files).weight_files(Path())


def test_model_beside_an_adapter_is_still_a_model() -> None:
    names = ("config.json", "model.safetensors", *SERVED)
    listing = RepositoryListing("commit", [RemoteFile(name, 1, "") for name in names])
    assert [each.name for each in listing.config_files()] == ["config.json"]
    assert [each.name for each in listing.weight_files(Path())] == ["model.safetensors"]


def test_adapters_of_the_start_get_ids_in_order(tmp_path: Path) -> None:
    paths = [str(write_adapter(tmp_path / name)) for name in ("sql", "chat")]
    config = Config(
        lora=(f"sql={paths[0]}", "gone=/nowhere", f"chat=file://{paths[1]}"), served_model_name="base"
    )
    assert locate_start_adapters(config) == (
        StartAdapter(1, "sql", paths[0], paths[0]),
        StartAdapter(2, "chat", f"file://{paths[1]}", paths[1]),
    )
    with pytest.raises(ConfigError, match="the name of the model"):
        locate_start_adapters(Config(lora=(f"base={paths[0]}",), served_model_name="base"))


@pytest.mark.parametrize("uri", ["/nowhere", "file:///nowhere"])
def test_directory_without_an_adapter_is_named(uri: str) -> None:
    with pytest.raises(ConfigError, match=r"no adapter found: there is no adapter_config.json in /nowhere"):
        locate_adapter(uri, None)


def test_path_that_cannot_be_looked_at_is_named() -> None:
    """Some versions of Python raise for it, and others say that there is no such file."""
    with pytest.raises(ConfigError, match=r"adapter_config.json"):
        locate_adapter("/" + "a" * 300, None)


def test_unknown_scheme_is_named() -> None:
    with pytest.raises(ConfigError, match="unknown scheme"):
        locate_adapter("ftp://host/adapter", None)
