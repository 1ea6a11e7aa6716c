"""Fetchers that send a model to each other: one download from the hub for all nodes, under faults of peers, too."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from fake_hub import FakeHub, commit_of, running_hub
from operator_process import eventually

from skiff_runtime.contract import ENV_HUB_ENDPOINT, ENV_PEER_TOKEN, EXIT_FETCH_FAILED, EXIT_OK
from skiff_runtime.errors import ConfigError
from skiff_runtime.fetch.peer_server import PeerServer, offered_model
from skiff_runtime.hub import peer_client, peer_protocol
from skiff_runtime.hub.fetch import Peers, fetch
from skiff_runtime.hub.hub_reference import parse_reference
from skiff_runtime.hub.model_cache import ModelCache

REFERENCE = parse_reference("hf://acme/tiny")
TOKEN = "0123456789abcdef-token"
WEIGHTS = "model.safetensors"
WEIGHT_BYTES = 300_000
NODES = 10


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A repository of small configuration files and one large file of weights."""
    model = tmp_path / "hub" / "acme" / "tiny"
    (model / "1_Pooling").mkdir(parents=True)
    (model / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (model / "tokenizer.json").write_text(json.dumps({"pad": "x" * 20_000}))
    (model / "1_Pooling/config.json").write_text("{}")
    (model / WEIGHTS).write_bytes(bytes((i * i) % 251 for i in range(WEIGHT_BYTES)))
    return model


@pytest.fixture
def hub(model: Path) -> Iterator[FakeHub]:
    with running_hub(model.parent.parent) as running:
        yield running


@dataclass
class Node:
    """A fetcher as a process of its own, with a disk of its own."""

    process: subprocess.Popen[str]
    log: Path
    cache: Path

    @property
    def url(self) -> str:
        """The address of its server, once it listens."""
        found = eventually(lambda: re.search(r"peer_server_started port=(\d+)", self.log.read_text()), "port")
        assert found is not None
        return f"http://127.0.0.1:{found[1]}"

    def is_complete(self) -> bool:
        """Return whether it has the model; AssertionError if it has ended."""
        assert self.process.poll() is None, self.log.read_text()
        return httpx.get(f"{self.url}/readyz", trust_env=False).status_code == 200


@contextmanager
def node(directory: Path, hub_url: str, *peers: Node) -> Iterator[Node]:
    """Run `skiff fetch --serve-peers` with these peers."""
    directory.mkdir(exist_ok=True)
    words = [sys.executable, "-m", "skiff_runtime", "fetch", "--model", "hf://acme/tiny"]
    words += ["--download-dir", str(directory), "--serve-peers", "0", "--host", "127.0.0.1"]
    words += [word for peer in peers for word in ("--peer", peer.url)]
    environ = {**os.environ, ENV_HUB_ENDPOINT: hub_url, ENV_PEER_TOKEN: TOKEN}
    log = directory.with_suffix(".log")
    with log.open("w") as stream:
        process = subprocess.Popen(words, env=environ, stdout=stream, stderr=stream, text=True)
    try:
        yield Node(process, log, directory)
    finally:
        process.kill()
        process.wait()


def assert_served(path: Path, model: Path) -> None:
    """The snapshot has the files of the repository."""
    for name in ("config.json", "tokenizer.json", "1_Pooling/config.json", WEIGHTS):
        assert (path / name).read_bytes() == (model / name).read_bytes(), name


def test_ten_nodes_download_a_model_once(tmp_path: Path, model: Path, hub: FakeHub) -> None:
    """The first node reads the hub; of those that have the model, each sends it to one more at a time."""
    with ExitStack() as stack:
        complete: list[Node] = []
        while len(complete) < NODES:
            count = min(max(len(complete), 1), NODES - len(complete))
            parents = [complete[i : i + 1] for i in range(count)]
            started = [
                stack.enter_context(node(tmp_path / f"node-{len(complete) + i}", hub.url, *parent))
                for i, parent in enumerate(parents)
            ]
            for each in started:
                eventually(each.is_complete, f"complete: {each.log}")
            complete += started
        for each in complete:
            assert_served(ModelCache(each.cache, REFERENCE).snapshot(commit_of(model)), model)
        for name in ("config.json", "tokenizer.json", "1_Pooling/config.json", WEIGHTS):
            assert len(hub.deliveries(name)) == 1, name
        [first, last] = complete[0], complete[-1]
        assert "source=peers" in last.log.read_text() and "source=peers" not in first.log.read_text()
        assert TOKEN not in "".join(each.log.read_text() for each in complete)
        last.process.send_signal(signal.SIGTERM)
        assert last.process.wait(20) == EXIT_OK
        # A port that is in use ends the command with one line.
        environ = {**os.environ, ENV_PEER_TOKEN: TOKEN}
        port = first.url.rpartition(":")[2]
        words = [sys.executable, "-m", "skiff_runtime", "fetch", "--model", "hf://acme/tiny"]
        words += ["--serve-peers", port, "--host", "127.0.0.1", "--download-dir", str(first.cache)]
        done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == EXIT_FETCH_FAILED and "use another port" in done.stderr


@contextmanager
def serving(cache: Path) -> Iterator[str]:
    """The server of this process over a cache; the address."""
    model = offered_model("hf://acme/tiny", None, cache)
    with PeerServer(model, token=TOKEN, host="127.0.0.1", port=0) as server:
        server.offer()
        yield f"http://127.0.0.1:{server.port}"


def receive(cache: Path, hub: FakeHub, *urls: str) -> Path:
    """Fetch with these peers."""
    return fetch(REFERENCE, cache, endpoint=hub.url, peers=Peers(urls, TOKEN))


@pytest.fixture
def seed(tmp_path: Path, hub: FakeHub) -> Path:
    """A cache that has the model; the hub has forgotten its requests."""
    fetch(REFERENCE, tmp_path / "seed", endpoint=hub.url)
    hub.seen.clear()
    return tmp_path / "seed"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_protocol, "BASE_WAIT_SECONDS", 0.01)


def test_nothing_is_served_without_the_token_or_outside_of_the_model(tmp_path: Path, seed: Path) -> None:
    with serving(seed) as url, serving(tmp_path / "empty") as empty:
        commit = httpx.get(f"{url}/status", trust_env=False).json()["commit"]
        authorized = {"Authorization": f"Bearer {TOKEN}"}

        def status(path: str, headers: dict[str, str], base: str = url) -> int:
            return httpx.get(f"{base}{path}", headers=headers, trust_env=False).status_code

        for headers in ({}, {"Authorization": TOKEN}, {"Authorization": f"Bearer {TOKEN}x"}):
            assert status("/manifest", headers) == status(f"/files/{commit}/config.json", headers) == 401
        assert status(f"/files/{commit}/config.json", authorized) == 200
        for name in (
            "absent.json",
            "../../.skiff/lock",
            "%2e%2e/%2e%2e/.skiff/lock",
            "//etc/passwd",
            "1_Pooling",
        ):
            assert status(f"/files/{commit}/{name}", authorized) == 404, name
        assert status(f"/files/{'0' * 40}/config.json", authorized) == 404
        assert status("/readyz", {}) == 200 and status("/readyz", {}, empty) == 503
        assert status("/manifest", authorized, empty) == 503 and status("/livez", {}, empty) == 200
        idle = httpx.get(f"{empty}/status", trust_env=False).json()
        assert idle == {"state": "fetching", "received_bytes": 0, "total_bytes": 0, "commit": ""}


def test_a_peer_that_is_gone_is_skipped(tmp_path: Path, model: Path, hub: FakeHub, seed: Path) -> None:
    with serving(seed) as url:
        assert_served(receive(tmp_path / "other", hub, "http://127.0.0.1:1", url), model)
    assert hub.seen == []


def test_without_any_peer_the_hub_is_read(tmp_path: Path, model: Path, hub: FakeHub, seed: Path) -> None:
    with serving(tmp_path / "empty") as url:
        assert_served(receive(tmp_path / "other", hub, url), model)
    assert len(hub.deliveries(WEIGHTS)) == 1


def test_a_file_that_was_cut_off_is_continued(
    tmp_path: Path, model: Path, hub: FakeHub, seed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed fetcher keeps the bytes that it has received, and only the rest is sent."""
    other = ModelCache(tmp_path / "other", REFERENCE)
    listing = ModelCache(seed, REFERENCE).list_verified()
    assert listing is not None
    digest = next(file.digest for file in listing.files if file.name == WEIGHTS)
    other.peer_partial(digest).write_bytes((model / WEIGHTS).read_bytes()[:200_000])
    os.utime(other.peer_partial(digest), (0, 0))  # a long time ago
    ranges = []
    append = peer_client.PeerClient._append

    def recorded(self: peer_client.PeerClient, url: str, partial: Path, start: int) -> None:
        ranges.append((url.rpartition("/")[2], start))
        append(self, url, partial, start)

    monkeypatch.setattr(peer_client.PeerClient, "_append", recorded)
    with serving(seed) as url:
        assert_served(receive(tmp_path / "other", hub, url), model)
    assert (WEIGHTS, 200_000) in ranges and hub.seen == []
    assert not list((other.root / "blobs").glob("*.incomplete"))


def test_a_damaged_file_of_a_peer_is_not_used(tmp_path: Path, model: Path, hub: FakeHub, seed: Path) -> None:
    """The other peer's is taken; with no other, the hub's."""
    fetch(REFERENCE, tmp_path / "good", endpoint=hub.url)
    hub.seen.clear()
    blob = (ModelCache(seed, REFERENCE).snapshot(commit_of(model)) / WEIGHTS).resolve()
    blob.write_bytes(b"\0" * WEIGHT_BYTES)
    with serving(seed) as bad, serving(tmp_path / "good") as good:
        assert_served(receive(tmp_path / "one", hub, bad, good), model)
        assert hub.seen == []
        assert_served(receive(tmp_path / "two", hub, bad), model)
    assert len(hub.deliveries(WEIGHTS)) == 1
    assert not list((ModelCache(tmp_path / "two", REFERENCE).root / "blobs").glob("*.incomplete"))


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        ({"model": "acme/other"}, "and not 'acme/tiny'"),
        ({"commit": "main"}, "it has commit 'main'"),
        ({"files": [{"name": "../x", "size_bytes": 1, "digest": "0" * 40}]}, "invalid entry '../x'"),
        ({"files": [{"name": "x", "size_bytes": -1, "digest": "0" * 40}]}, "invalid entry"),
        ({"files": [{"name": "x", "size_bytes": 1, "digest": "../" + "0" * 37}]}, "invalid entry"),
        ({"files": 1}, "malformed"),
    ],
)
def test_a_wrong_manifest_is_refused(tmp_path: Path, manifest: dict[str, object], message: str) -> None:
    client = peer_client.PeerClient(REFERENCE, ModelCache(tmp_path, REFERENCE), [], TOKEN)
    body = {"model": "acme/tiny", "commit": "0" * 40, "files": [], **manifest}
    with pytest.raises(peer_protocol.PeerError, match=re.escape(message)):
        client.check_manifest(peer_protocol.decode_manifest(json.dumps(body).encode()))


@pytest.mark.parametrize(
    ("urls", "token", "message"),
    [
        ([], "", "at least 16"),
        ([], "short", "at least 16"),
        ([], "with a space inside it", "at least 16"),
        (["10.0.0.1:80"], TOKEN, "is not an address"),
        (["http://10.0.0.1:80/files"], TOKEN, "is not an address"),
        (["http://a"] * 17, TOKEN, "at most 16"),
    ],
)
def test_wrong_peers_are_refused(urls: list[str], token: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        peer_protocol.check_peers(urls, token)
