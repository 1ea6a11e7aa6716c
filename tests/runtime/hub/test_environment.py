"""``skiff fetch`` obeys the environment of the hub's tools: token file, cache, offline mode, proxy, Xet."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import FakeHub, running_hub
from foreign_tokenizers import write_sentencepiece

from skiff_runtime.contract import EXIT_FETCH_FAILED, EXIT_OK
from skiff_runtime.conversion.tokenizer_json import find_or_convert_tokenizer

HUB_VARIABLES = ("HF_", "HUGGING_FACE", "XDG_")
UNPRIVILEGED = "" if os.geteuid() else "setpriv --bounding-set=-dac_override"
"""Prefix of a command that is subject to the permissions of directories even if it runs as root."""
ONE_ATTEMPT = "import skiff_runtime.hub.hub_client as client; client.ATTEMPTS = 1"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeHub]:
    directory = tmp_path_factory.mktemp("hub")
    model = directory / "acme" / "tiny"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"w" * 50_000)
    pieces = directory / "acme" / "pieces"
    shutil.copytree(model, pieces)
    (pieces / "config.json").write_text('{"model_type": "llama", "vocab_size": 420}')
    write_sentencepiece(pieces / "tokenizer.model")
    with running_hub(directory, token="hf_secret") as running:
        yield running


def skiff_fetch(
    tmp_path: Path,
    *flags: str,
    name: str = "tiny",
    before: str = "pass",
    launcher: str = "",
    **environment: str,
) -> "subprocess.CompletedProcess[str]":
    """Run ``skiff fetch`` with the home directory ``tmp_path``, after the code ``before``."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(HUB_VARIABLES)}
    code = f"import sys; {before}; from skiff_runtime.__main__ import main; sys.exit(main())"
    return subprocess.run(
        [*launcher.split(), sys.executable, "-c", code, "fetch", "--model", f"hf://acme/{name}", *flags],
        env={**inherited, "HOME": str(tmp_path), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def check(done: "subprocess.CompletedProcess[str]", expected: Path) -> None:
    assert done.returncode == EXIT_OK, done.stderr
    snapshot = Path(done.stdout.strip())
    assert snapshot.is_relative_to(expected)
    assert (snapshot / "model.safetensors").read_bytes() == b"w" * 50_000


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "secrets" / "token"
    path.parent.mkdir()
    path.write_text("hf_secret\n")
    return path


def test_token_file_and_shared_cache_are_the_default(hub: FakeHub, tmp_path: Path, tokens: Path) -> None:
    done = skiff_fetch(tmp_path, HF_ENDPOINT=hub.url, HF_TOKEN_PATH=str(tokens))
    check(done, tmp_path / ".cache" / "huggingface" / "hub")
    assert "hf_secret" not in done.stderr + done.stdout


def test_hf_home_holds_token_and_cache(hub: FakeHub, tmp_path: Path, tokens: Path) -> None:
    check(skiff_fetch(tmp_path, HF_ENDPOINT=hub.url, HF_HOME=str(tokens.parent)), tokens.parent / "hub")


def test_offline_mode_serves_complete_snapshots_and_refuses_others(
    hub: FakeHub, tmp_path: Path, tokens: Path
) -> None:
    online = {"HF_ENDPOINT": hub.url, "HF_TOKEN_PATH": str(tokens)}
    seen = len(hub.seen)
    refused = skiff_fetch(tmp_path, HF_HUB_OFFLINE="1", **online)
    assert refused.returncode == EXIT_FETCH_FAILED
    assert "HF_HUB_OFFLINE forbids" in refused.stderr and "Traceback" not in refused.stderr
    assert len(hub.seen) == seen
    check(skiff_fetch(tmp_path, **online), tmp_path)
    shutil.rmtree(next(tmp_path.rglob(".skiff")))  # as after a download by another tool
    seen = len(hub.seen)
    done = skiff_fetch(tmp_path, HF_HUB_OFFLINE="1", **online)
    check(done, tmp_path)
    assert "fetch_fell_back_to_cache" in done.stderr and len(hub.seen) == seen
    (blob,) = [path for path in tmp_path.rglob("blobs/*") if path.stat().st_size == 50_000]
    shutil.rmtree(next(tmp_path.rglob(".skiff")))
    blob.write_bytes(b"W" * 50_000)
    damaged = skiff_fetch(tmp_path, HF_HUB_OFFLINE="1", **online)
    assert damaged.returncode == EXIT_FETCH_FAILED and "fetch_cache_damaged" in damaged.stderr


def test_read_only_cache_is_served_with_and_without_marker(hub: FakeHub, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    flags = ("--download-dir", str(cache))
    check(skiff_fetch(tmp_path, *flags, HF_ENDPOINT=hub.url, HF_TOKEN="hf_secret"), cache)
    for has_marker in (True, False):
        if not has_marker:
            shutil.rmtree(next(cache.rglob(".skiff")))
        folders = [cache, *(path for path in cache.rglob("*") if path.is_dir())]
        for path in folders:
            path.chmod(0o555)
        done = skiff_fetch(tmp_path, *flags, launcher=UNPRIVILEGED, HF_ENDPOINT="http://127.0.0.1:9")
        for path in folders:
            path.chmod(0o755)
        check(done, cache)
        assert "fetch_started" not in done.stderr


def test_proxy_of_the_environment_is_used(hub: FakeHub, tmp_path: Path) -> None:
    done = skiff_fetch(
        tmp_path,
        before=ONE_ATTEMPT,
        HF_ENDPOINT="http://hub.invalid",
        HTTP_PROXY="http://127.0.0.1:9",
        NO_PROXY="",
    )
    assert done.returncode == EXIT_FETCH_FAILED
    assert "check the network, the proxy" in done.stderr and "Connection refused" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("before", ["pass", "sys.modules['hf_xet'] = None"], ids=["present", "absent"])
def test_fetch_works_with_and_without_xet(hub: FakeHub, tmp_path: Path, before: str) -> None:
    done = skiff_fetch(tmp_path, before=before, HF_ENDPOINT=hub.url, HF_TOKEN="hf_secret")
    check(done, tmp_path)


@pytest.mark.parametrize("flags", [(), ("--download-dir", "{home}/.cache/huggingface/hub")], ids=["", "flag"])
def test_only_the_model_is_requested_and_written(
    hub: FakeHub, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    seen = len(hub.seen)
    given = [flag.format(home=tmp_path) for flag in flags]
    check(skiff_fetch(tmp_path, *given, HF_ENDPOINT=hub.url, HF_TOKEN="hf_secret"), tmp_path)
    assert all("acme/tiny" in request.path for request in hub.seen[seen:])
    written = {path.relative_to(tmp_path).parts[:3] for path in tmp_path.rglob("*")}
    assert {parts for parts in written if len(parts) == 3} == {(".cache", "huggingface", "hub")}


def test_fetch_converts_the_tokenizer(hub: FakeHub, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    flags = ("--download-dir", str(cache))
    done = skiff_fetch(tmp_path, *flags, name="pieces", HF_ENDPOINT=hub.url, HF_TOKEN="hf_secret")
    check(done, cache)
    (converted,) = (cache / "tokenizers").glob("*/tokenizer.json")
    assert find_or_convert_tokenizer(Path(done.stdout.strip()), [cache]) == converted.parent
    assert not list(cache.rglob("snapshots/*/tokenizer.json"))
    again = skiff_fetch(tmp_path, *flags, name="pieces", HF_ENDPOINT="http://127.0.0.1:9")
    check(again, cache)
    assert "tokenizer_conversion_started" not in again.stderr
