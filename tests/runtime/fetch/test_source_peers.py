"""Fetchers of s3:// and oci:// models that send them to each other, verified by the SHA-256 that the first one computes."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from fake_registry import TITLE, running_registry
from fake_s3 import FakeS3, running_s3_of_environment
from operator_process import eventually

from skiff_runtime.errors import ConfigError
from skiff_runtime.fetch.peer_server import PeerServer, offered_model
from skiff_runtime.hub import peer_protocol
from skiff_runtime.hub.fetch import Peers
from skiff_runtime.sources.directory_cache import MANIFEST, DirectoryCache
from skiff_runtime.sources.fetch import fetch_model, wait_for_model
from skiff_runtime.sources.peer_source import PeerSource
from skiff_runtime.sources.source_reference import parse_source
from skiff_runtime.transfer import parallel_download, retries

URI = "s3://models/llama"
TOKEN = "0123456789abcdef-token"
WEIGHTS = "model.safetensors"
CHUNK = 100_000


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of small configuration files, and weights of four chunks."""
    folder = tmp_path / "store" / "models" / "llama"
    (folder / "1_Pooling").mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "1_Pooling/config.json"):
        (folder / name).write_text("{}")
    (folder / WEIGHTS).write_bytes(bytes((i * i) % 251 for i in range(3 * CHUNK + 17)))
    return folder


@pytest.fixture
def store(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeS3]:
    monkeypatch.setattr(retries, "BASE_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(peer_protocol, "BASE_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(parallel_download, "CHUNK_BYTES", CHUNK)
    with running_s3_of_environment(tmp_path / "store", monkeypatch) as running:
        yield running


@contextmanager
def serving(cache: Path, uri: str = URI) -> Iterator[str]:
    """The server of this process over a cache; the address."""
    model = offered_model(uri, None, cache)
    with PeerServer(model, token=TOKEN, host="127.0.0.1", port=0) as server:
        model.prepare()
        server.offer()
        yield f"http://127.0.0.1:{server.port}"


@pytest.fixture
def seed(tmp_path: Path, store: FakeS3) -> Path:
    """A cache that has the model; the store has forgotten its requests."""
    fetch_model(URI, None, tmp_path / "seed")
    store.seen.clear()
    return tmp_path / "seed"


def receive(cache: Path, *urls: str, uri: str = URI) -> Path:
    """Fetch with these peers."""
    return fetch_model(uri, None, cache, peers=Peers(urls, TOKEN))


def assert_served(path: Path, model: Path) -> None:
    for name in ("config.json", "tokenizer.json", "1_Pooling/config.json", WEIGHTS):
        assert (path / name).read_bytes() == (model / name).read_bytes(), name


def test_a_model_goes_from_node_to_node_and_the_store_is_not_asked(
    tmp_path: Path, model: Path, store: FakeS3, seed: Path
) -> None:
    with serving(seed) as first:
        assert_served(receive(tmp_path / "second", first), model)
    with serving(tmp_path / "second") as second:
        assert_served(receive(tmp_path / "third", "http://127.0.0.1:1", second), model)
    assert store.seen == []
    manifests = [json.loads((DirectoryCache(tmp_path / each, parse_source(URI)).model / MANIFEST).read_text()) for each in ("seed", "second", "third")]  # fmt: skip
    assert manifests[0] == manifests[1] == manifests[2] and len(manifests[0]["sha256"]) == 4


def test_a_file_that_a_peer_has_damaged_is_not_used(
    tmp_path: Path, model: Path, store: FakeS3, seed: Path
) -> None:
    """The other peer's is taken; with no other, the store's."""
    with serving(seed) as url:
        receive(tmp_path / "good", url)
    with serving(seed) as bad, serving(tmp_path / "good") as good:
        weights = DirectoryCache(seed, parse_source(URI)).model / WEIGHTS
        weights.write_bytes(bytes(weights.stat().st_size))
        assert_served(receive(tmp_path / "one", bad, good), model)
        assert store.seen == []
        assert_served(receive(tmp_path / "two", bad), model)
    assert len(store.deliveries(WEIGHTS)) == 4


def test_without_a_peer_that_has_it_the_store_is_read(
    tmp_path: Path, model: Path, store: FakeS3, seed: Path
) -> None:
    with serving(tmp_path / "empty") as url:
        assert_served(receive(tmp_path / "other", url), model)
    assert len(store.deliveries(WEIGHTS)) == 4


def test_what_a_peer_has_sent_before_an_interruption_is_kept(
    tmp_path: Path, model: Path, store: FakeS3, seed: Path
) -> None:
    """The rest comes from the store, whose version is the same one."""
    whole = PeerSource.stream
    with serving(seed) as url, pytest.MonkeyPatch.context() as patch:

        def cut(self: PeerSource, remote: object, start: int, stop: int) -> Iterator[object]:
            if getattr(remote, "name", "") == WEIGHTS and start >= 2 * CHUNK:
                raise peer_protocol.PeerError("the peer is gone")
            return whole(self, remote, start, stop)  # type: ignore[arg-type]

        patch.setattr(PeerSource, "stream", cut)
        patch.setattr(parallel_download, "STREAMS", 1)
        assert_served(receive(tmp_path / "other", url), model)
    assert len(store.deliveries(WEIGHTS)) == 2


def test_an_artifact_keeps_the_digests_of_its_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "BASE_WAIT_SECONDS", 0.01)
    files = {"config.json": b"{}", WEIGHTS: b"weights"}
    with running_registry() as registry:
        layers = [{"content": content, "annotations": {TITLE: name}} for name, content in files.items()]
        digest = registry.push("org/llama:v1", layers)
        for version in (":v1", f"@{digest}"):
            uri = f"oci://{registry.host}/org/llama{version}"
            fetch_model(uri, None, tmp_path / "seed")
            cache = DirectoryCache(tmp_path / "seed", parse_source(uri))
            listing = cache.list_verified()
            assert listing is not None, "no file was read again for its digest"
            registry.seen.clear()
            with serving(tmp_path / "seed", uri) as url:
                path = receive(tmp_path / "other", url, uri=uri)
            assert {name: (path / name).read_bytes() for name in files} == files
            assert registry.seen == []


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        ({"model": "s3://models/other"}, "and not 's3://models/llama'"),
        ({"commit": "../v"}, "no version"),
        ({"files": []}, "no files"),
        ({"files": [{"name": "x", "size_bytes": 1, "digest": "0" * 40}]}, "no SHA-256 of 'x'"),
    ],
)
def test_a_wrong_manifest_is_refused(manifest: dict[str, object], message: str) -> None:
    source = PeerSource(parse_source(URI), Peers(("http://127.0.0.1:1",), TOKEN))
    file = {"name": "config.json", "size_bytes": 1, "digest": "0" * 64}
    body = {"model": URI, "commit": "v1", "files": [file], **manifest}
    with pytest.raises(peer_protocol.PeerError, match=re.escape(message)):
        source.check_manifest(peer_protocol.decode_manifest(json.dumps(body).encode()))


def test_a_pod_waits_for_the_model_and_writes_nothing(
    tmp_path: Path, model: Path, store: FakeS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    fetched: list[Path] = []

    def fetch_meanwhile(_: float) -> None:
        assert not cache.exists()
        fetched.append(fetch_model(URI, None, cache))

    monkeypatch.setattr("skiff_runtime.sources.fetch.time.sleep", fetch_meanwhile)
    assert [wait_for_model(URI, None, cache)] == fetched
    with pytest.raises(ConfigError, match="--revision is for hf://"):
        wait_for_model(URI, "v1", cache)


def test_without_a_token_progress_is_reported_and_no_file_is_sent(
    tmp_path: Path, model: Path, store: FakeS3
) -> None:
    """As the fetcher of a shared claim runs, which has no peers."""
    words = [sys.executable, "-m", "skiff_runtime", "fetch", "--model", URI, "--host", "127.0.0.1"]
    words += ["--download-dir", str(tmp_path / "cache"), "--serve-peers", "0"]
    log = tmp_path / "log"
    with log.open("w") as stream:
        process = subprocess.Popen(words, env=os.environ.copy(), stdout=stream, stderr=stream)
    try:
        found = eventually(lambda: re.search(r"peer_server_started port=(\d+)", log.read_text()), "port")
        assert found is not None
        url = f"http://127.0.0.1:{found[1]}"
        eventually(lambda: httpx.get(f"{url}/readyz", trust_env=False).status_code == 200, "complete")
        status = httpx.get(f"{url}/status", trust_env=False).json()
        assert status["total_bytes"] == 3 * CHUNK + 17 + 6 and status["commit"]
        for headers in ({}, {"Authorization": "Bearer None"}):
            assert httpx.get(f"{url}/manifest", headers=headers, trust_env=False).status_code == 401
    finally:
        process.kill()
        process.wait()
