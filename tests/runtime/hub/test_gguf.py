"""GGUF models on a hub: the one file of a quantization is downloaded, verified, and served without network afterwards."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import FakeHub, commit_of, running_hub
from gguf_models import make_gguf

from skiff_runtime.config import Config
from skiff_runtime.errors import ConfigError, FetchError
from skiff_runtime.hub import hub_client as client
from skiff_runtime.hub.fetch import fetch, fetch_config
from skiff_runtime.hub.hub_reference import parse_reference
from skiff_runtime.processes.resolve import resolve

FILES = ("tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf", "tiny-UD-Q4_K_M.gguf")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with three quantizations, each a model of its own."""
    directory = tmp_path_factory.mktemp("hub")
    model = directory / "acme" / "tiny-GGUF"
    model.mkdir(parents=True)
    for number, (name, kind) in enumerate(zip(FILES, ("Q4_K", "Q8_0", "Q4_0"), strict=True)):
        make_gguf(directory.parent / f"made{number}", kind=kind).rename(model / name)
    (model / "README.md").write_text("not wanted")
    return model


@pytest.fixture
def hub(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setattr(client, "BASE_WAIT_SECONDS", 0.01)
    with running_hub(repository.parent.parent) as running:
        yield running


def test_file_of_a_quantization_is_fetched_alone(hub: FakeHub, repository: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    path = fetch(parse_reference("hf://acme/tiny-GGUF:q4_k_m"), cache, endpoint=hub.url)
    snapshot = cache / "models--acme--tiny-GGUF" / "snapshots" / commit_of(repository)
    assert path == snapshot / FILES[0]
    assert path.read_bytes() == (repository / FILES[0]).read_bytes()
    assert [file.name for file in snapshot.iterdir()] == [FILES[0]]


def test_each_quantization_is_complete_by_itself_without_network(repository: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    names = {"Q4_K_M": FILES[0], "Q8_0": FILES[1], "UD-Q4_K_M": FILES[2]}
    with running_hub(repository.parent.parent) as hub:
        for quant_type, name in names.items():
            found = fetch(parse_reference(f"hf://acme/tiny-GGUF:{quant_type}"), cache, endpoint=hub.url)
            assert found.name == name
        requests = len(hub.seen)
        assert fetch(parse_reference("hf://acme/tiny-GGUF:Q8_0"), cache, endpoint=hub.url).name == FILES[1]
        assert len(hub.seen) == requests
    for quant_type, name in names.items():
        assert fetch(parse_reference(f"hf://acme/tiny-GGUF:{quant_type}"), cache).name == name


@pytest.mark.parametrize(
    ("uri", "problem"),
    [
        (
            "hf://acme/tiny-GGUF",
            "it has the GGUF files tiny-Q4_K_M.gguf, tiny-Q8_0.gguf, tiny-UD-Q4_K_M.gguf",
        ),
        ("hf://acme/tiny-GGUF:Q5_0", "'Q5_0' chooses none of its GGUF files tiny-Q4_K_M.gguf"),
    ],
)
def test_choice_that_is_not_one_file_is_refused(hub: FakeHub, tmp_path: Path, uri: str, problem: str) -> None:
    with pytest.raises(FetchError) as caught:
        fetch(parse_reference(uri), tmp_path / "cache", endpoint=hub.url)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    "uri", ["hf://acme/tiny:", "hf://acme/tiny:Q4 K", "hf://acme/tiny:../x", "hf://acme/tiny:a:b"]
)
def test_malformed_quantization_is_refused(uri: str) -> None:
    with pytest.raises(ConfigError, match="is not the quantization of a GGUF file"):
        parse_reference(uri)


def test_quantization_is_refused_for_a_model_with_safetensors(tmp_path: Path) -> None:
    model = tmp_path / "hub" / "acme" / "tiny"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"x")
    with (
        running_hub(tmp_path / "hub") as hub,
        pytest.raises(FetchError, match="'Q8_0' chooses none; omit it"),
    ):
        fetch(parse_reference("hf://acme/tiny:Q8_0"), tmp_path / "cache", endpoint=hub.url)


def test_uri_is_resolved_to_a_model_with_its_tokenizer(hub: FakeHub, tmp_path: Path) -> None:
    fetch(parse_reference("hf://acme/tiny-GGUF:Q8_0"), tmp_path / "cache", endpoint=hub.url)
    options = {"model": "hf://acme/tiny-GGUF:Q8_0", "download_dir": str(tmp_path / "cache"), "device": "cpu"}
    config, model = resolve(Config(**options))  # type: ignore[arg-type]
    assert model.path.name == FILES[1] and model.architecture == "LlamaForCausalLM"
    assert (model.tokenizer_path / "tokenizer.json").is_file()
    assert config.served_model_name == "tiny-GGUF:Q8_0"


def test_configuration_alone_cannot_be_fetched_but_is_read_from_the_cache(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = parse_reference("hf://acme/tiny-GGUF:Q8_0")
    with monkeypatch.context() as patch:
        patch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        with pytest.raises(FetchError, match="whose configuration is inside of its file; download it first"):
            fetch_config(reference, tmp_path / "cache", tmp_path / "temporary")
    path = fetch(reference, tmp_path / "cache", endpoint=hub.url)
    assert fetch_config(reference, tmp_path / "cache", tmp_path / "temporary") == path
