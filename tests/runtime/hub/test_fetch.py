"""Downloads from a hub: complete, resumed and reused."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_hub import FakeHub, commit_of, running_hub
from fake_source import Fault
from huggingface_hub import constants, hf_hub_download, scan_cache_dir

from skiff_runtime.contract import ENV_HUB_ENDPOINT, EXIT_FETCH_FAILED, EXIT_OK
from skiff_runtime.errors import FetchError
from skiff_runtime.hub import hub_client as client
from skiff_runtime.hub.fetch import fetch
from skiff_runtime.hub.hub_reference import HubReference, parse_reference
from skiff_runtime.hub.model_cache import SPARE_BYTES
from skiff_runtime.transfer import download_progress as progress
from skiff_runtime.transfer import parallel_download, retries
from skiff_runtime.transfer.range_source import TransientSourceError

WEIGHT_BYTES = 300_000
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
REFERENCE = parse_reference("hf://acme/tiny")
SERVED = {
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "chat_template.jinja",
    "modules.json",
    "1_Pooling/config.json",
    "model.safetensors.index.json",
    FIRST,
    SECOND,
}


def write_model(directory: Path) -> Path:
    """Write a repository that also has files that serving does not need."""
    model = directory / "acme" / "tiny"
    for folder in ("onnx", "1_Pooling"):
        (model / folder).mkdir(parents=True)
    (model / "modules.json").write_text("[]")
    (model / "1_Pooling/config.json").write_text('{"pooling_mode_lasttoken": true}')
    index = {"weight_map": {"a": FIRST, "b": SECOND, "c": FIRST}}
    (model / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (model / "generation_config.json").write_text("{}")
    (model / "tokenizer.json").write_text(json.dumps({"pad": "x" * 20_000}))
    (model / "tokenizer.model").write_bytes(b"\0pieces")
    (model / "tokenizer_config.json").write_text('{"a": 1}')
    (model / "chat_template.jinja").write_text("{{ messages }}")
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    for seed, name in enumerate((FIRST, SECOND, "consolidated.safetensors")):
        (model / name).write_bytes(bytes((seed + i * i) % 251 for i in range(WEIGHT_BYTES)))
    for name in (
        "README.md",
        "pytorch_model.bin",
        "onnx/model.onnx",
        "onnx/config.json",
        "1_Pooling/other.json",
    ):
        (model / name).write_text("not wanted")
    return model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "hub")


@pytest.fixture
def hub(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setattr(client, "BASE_WAIT_SECONDS", 0.01)
    with running_hub(model.parent.parent) as running:
        yield running


def fetch_from(hub: FakeHub, cache: Path, reference: HubReference = REFERENCE) -> Path:
    return fetch(reference, cache, endpoint=hub.url)


def assert_served(snapshot: Path, model: Path) -> None:
    files = {str(path.relative_to(snapshot)) for path in snapshot.rglob("*") if not path.is_dir()}
    assert files == SERVED
    for name in SERVED:
        assert (snapshot / name).read_bytes() == (model / name).read_bytes(), name


def test_only_files_that_serving_needs_are_downloaded(hub: FakeHub, model: Path, tmp_path: Path) -> None:
    snapshot = fetch_from(hub, tmp_path / "cache")
    assert snapshot == tmp_path / "cache" / "models--acme--tiny" / "snapshots" / commit_of(model)
    assert_served(snapshot, model)
    assert not list((tmp_path / "cache").rglob("*.incomplete"))


def test_model_safetensors_is_preferred_to_other_weight_files(
    hub: FakeHub, model: Path, tmp_path: Path
) -> None:
    for path in model.glob("model*"):
        path.unlink()
    (model / "model.safetensors").write_bytes(b"w" * WEIGHT_BYTES)
    snapshot = fetch_from(hub, tmp_path / "cache")
    assert [path.name for path in snapshot.glob("*.safetensors")] == ["model.safetensors"]


def test_complete_model_needs_no_network(model: Path, tmp_path: Path) -> None:
    with running_hub(model.parent.parent) as hub:
        first = fetch_from(hub, tmp_path / "cache")
    assert fetch_from(hub, tmp_path / "cache") == first
    by_commit = HubReference("acme", "tiny", commit_of(model))
    assert fetch_from(hub, tmp_path / "cache", by_commit) == first


def test_cache_is_readable_for_other_tools_of_the_hub(hub: FakeHub, model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    snapshot = fetch_from(hub, cache)
    found = hf_hub_download("acme/tiny", "config.json", cache_dir=cache, local_files_only=True)
    assert Path(found) == snapshot / "config.json"
    scanned = scan_cache_dir(cache)
    (repository,) = scanned.repos
    assert not scanned.warnings
    assert repository.nb_files == len(SERVED)
    assert repository.refs["main"].commit_hash == commit_of(model)


def test_files_of_other_tools_are_only_verified(hub: FakeHub, model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for name in SERVED:
        hf_hub_download("acme/tiny", name, cache_dir=cache, endpoint=hub.url)
    before = len(hub.deliveries(FIRST))
    assert_served(fetch_from(hub, cache), model)
    assert len(hub.deliveries(FIRST)) == before == 1


def test_damaged_snapshot_is_repaired(hub: FakeHub, model: Path, tmp_path: Path) -> None:
    snapshot = fetch_from(hub, tmp_path / "cache")
    (snapshot / SECOND).write_bytes(b"short")
    assert_served(fetch_from(hub, tmp_path / "cache"), model)
    assert len(hub.deliveries(FIRST)) == 1
    assert len(hub.deliveries(SECOND)) == 2


def test_interrupted_download_is_resumed(
    hub: FakeHub, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)
    hub.faults[FIRST] = [Fault(cut_after_bytes=100_000), Fault(cut_after_bytes=50_000)]
    assert_served(fetch_from(hub, tmp_path / "cache"), model)
    ranges = [seen.headers.get("range") for seen in hub.deliveries(FIRST)]
    assert ranges == [None, "bytes=100000-", "bytes=150000-"]


def test_server_that_ignores_ranges_is_tolerated(
    hub: FakeHub, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)
    hub.faults[FIRST] = [Fault(cut_after_bytes=70_000), Fault(ignore_range=True)]
    assert_served(fetch_from(hub, tmp_path / "cache"), model)


class TestRanges:
    """Large files of a hub without Xet: in parallel ranges, straight from the storage."""

    CHUNK = 100_000
    RANGES = ("bytes=0-99999", "bytes=100000-199999", "bytes=200000-299999")

    @pytest.fixture(autouse=True)
    def small_chunks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(parallel_download, "CHUNK_BYTES", self.CHUNK)
        monkeypatch.setattr(retries, "BASE_WAIT_SECONDS", 0.01)

    @pytest.fixture
    def one_stream(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(parallel_download, "STREAMS", 1)

    def ranges(self, hub: FakeHub, name: str) -> list[str | None]:
        return [seen.headers.get("range") for seen in hub.deliveries(name)]

    def locations(self, hub: FakeHub, name: str) -> int:
        return sum(seen.method == "HEAD" and seen.path.endswith(f"/{name}") for seen in hub.seen)

    def test_cache_is_that_of_the_hubs_tools(
        self, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        cache = tmp_path / "cache"
        with running_hub(model.parent.parent, token="hf_secret") as hub:
            assert_served(fetch_from(hub, cache), model)
        for name in (FIRST, SECOND):
            assert sorted(map(str, self.ranges(hub, name))) == list(self.RANGES)
            assert self.locations(hub, name) == 1
            found = Path(hf_hub_download("acme/tiny", name, cache_dir=cache, local_files_only=True))
            assert found.read_bytes() == (model / name).read_bytes()
        assert all("authorization" not in seen.headers for seen in hub.seen if seen.server == "storage")
        (markers,) = cache.glob("*/.skiff")
        assert {path.name for path in markers.iterdir()} == {"lock", f"{commit_of(model)}.json"}

    @pytest.mark.usefixtures("one_stream")
    def test_next_fetch_continues_what_has_arrived(
        self, hub: FakeHub, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hub.faults[FIRST] = [Fault(), *[Fault(status=503)] * retries.ATTEMPTS]
        with pytest.raises(FetchError, match="503"):
            fetch_from(hub, tmp_path / "cache")
        before = len(hub.deliveries(FIRST))
        # The volume has no room for the whole of it beside the part.
        free = 2 * WEIGHT_BYTES - self.CHUNK + SPARE_BYTES
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
        assert_served(fetch_from(hub, tmp_path / "cache"), model)
        assert self.ranges(hub, FIRST)[before:] == list(self.RANGES[1:])

    @pytest.mark.usefixtures("one_stream")
    def test_address_that_has_expired_is_renewed(self, hub: FakeHub, model: Path, tmp_path: Path) -> None:
        hub.faults[FIRST] = [Fault(), Fault(status=403)]
        assert_served(fetch_from(hub, tmp_path / "cache"), model)
        assert (self.locations(hub, FIRST), self.locations(hub, SECOND)) == (2, 1)

    @pytest.mark.parametrize("fault", [Fault(ignore_range=True), Fault(status=403)])
    @pytest.mark.usefixtures("one_stream")
    def test_storage_without_ranges_sends_one_stream(
        self, fault: Fault, hub: FakeHub, model: Path, tmp_path: Path
    ) -> None:
        hub.faults[FIRST] = [fault]
        assert_served(fetch_from(hub, tmp_path / "cache"), model)
        assert self.ranges(hub, FIRST) == [self.RANGES[0], None]


def test_wait_that_a_source_demands_is_kept() -> None:
    waits: list[float | None] = []

    class Stop(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout)
            return False

    attempts = retries.Retries("a file", Stop())
    attempts.wait(TransientSourceError("busy", wait_seconds=200))
    attempts.wait(TransientSourceError("busy"))
    assert waits[0] == 200 and 0 < (waits[1] or 0) < 10


def test_file_that_is_damaged_once_is_downloaded_again(hub: FakeHub, model: Path, tmp_path: Path) -> None:
    hub.faults["config.json"] = [Fault(corrupt=True)]
    hub.faults[SECOND] = [Fault(corrupt=True)]
    assert_served(fetch_from(hub, tmp_path / "cache"), model)


def test_transient_errors_are_retried(hub: FakeHub, model: Path, tmp_path: Path) -> None:
    hub.faults["listing"] = [Fault(status=429), Fault(status=503)]
    hub.faults["config.json"] = [Fault(status=503), Fault(status=502)]
    assert_served(fetch_from(hub, tmp_path / "cache"), model)


def test_retry_after_is_obeyed(hub: FakeHub, model: Path, tmp_path: Path) -> None:
    hub.faults["config.json"] = [Fault(status=429, headers={"Retry-After": "1"})]
    started = time.monotonic()
    assert_served(fetch_from(hub, tmp_path / "cache"), model)
    assert time.monotonic() - started >= 1.0
    assert len(hub.deliveries("config.json")) == 2


def test_token_is_sent_to_the_hub_alone(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with running_hub(model.parent.parent, token="hf_secret") as hub:
        assert_served(fetch_from(hub, tmp_path / "cache"), model)
    stored = [seen for seen in hub.seen if seen.server == "storage"]
    assert len(stored) == 3
    assert all("authorization" not in seen.headers for seen in stored)
    assert all(
        seen.headers["authorization"] == "Bearer hf_secret" for seen in hub.seen if seen.server == "hub"
    )


def test_concurrent_fetches_share_one_download(hub: FakeHub, model: Path, tmp_path: Path) -> None:
    hub.bytes_per_second = 1_000_000
    results: list[Path] = []
    threads = [
        threading.Thread(target=lambda: results.append(fetch_from(hub, tmp_path / "cache"))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 4
    assert_served(results[0], model)
    deliveries = [seen for seen in hub.seen if seen.server == "storage"]
    assert len(deliveries) == 3  # tokenizer.json and two weight files, once each


def test_stale_partial_files_are_removed_unless_locked(hub: FakeHub, model: Path, tmp_path: Path) -> None:
    blobs = tmp_path / "cache" / "models--acme--tiny" / "blobs"
    blobs.mkdir(parents=True)
    old, held, recent = (blobs / f"{letter * 40}.12345678.incomplete" for letter in "abc")
    for path in (old, held, recent):
        path.write_bytes(b"x")
    for path in (old, held):
        os.utime(path, (time.time() - 600, time.time() - 600))
    lock = tmp_path / "cache" / ".locks" / "models--acme--tiny" / f"{'b' * 40}.lock"
    lock.parent.mkdir(parents=True)
    holder = subprocess.Popen(["flock", str(lock), "sleep", "60"])
    try:
        while subprocess.run(["flock", "--nonblock", str(lock), "true"]).returncode == 0:
            time.sleep(0.05)
        assert_served(fetch_from(hub, tmp_path / "cache"), model)
    finally:
        holder.kill()
        holder.wait()
    assert sorted(blobs.glob("*.incomplete")) == [held, recent]


class TestCommand:
    """``skiff fetch`` as in an init container."""

    def start(self, hub: FakeHub, cache: Path) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "skiff_runtime", "fetch", "--model", "hf://acme/tiny"]
        environment = {**os.environ, ENV_HUB_ENDPOINT: hub.url, "HF_TOKEN": "hf_secret"}
        return subprocess.Popen(
            [*command, "--download-dir", str(cache)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def test_sigterm_ends_the_fetch_and_the_next_one_resumes_it(
        self, hub: FakeHub, model: Path, tmp_path: Path
    ) -> None:
        cache = tmp_path / "cache"
        hub.bytes_per_second = 50_000
        first = self.start(hub, cache)
        deadline = time.monotonic() + 60
        while not hub.deliveries(FIRST):
            assert time.monotonic() < deadline and first.poll() is None
            time.sleep(0.05)
        first.send_signal(signal.SIGTERM)
        _, errors = first.communicate(timeout=60)
        assert first.returncode == EXIT_FETCH_FAILED, errors
        assert "interrupted" in errors
        hub.bytes_per_second = 0
        second = self.start(hub, cache)
        output, errors = second.communicate(timeout=60)
        assert second.returncode == EXIT_OK, errors
        assert_served(Path(output.strip()), model)
        assert len(hub.deliveries("tokenizer.json")) == 1  # complete before the interruption
        assert "percent=100" in errors
        assert "hf_secret" not in errors and "signature" not in errors


def test_progress_is_logged_as_a_percentage(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(progress, "REPORT_SECONDS", 0.01)
    received = 500
    with caplog.at_level("INFO", logger="skiff"), progress.report_progress(1000, lambda: received):
        while "percent=50.0" not in caplog.text:
            time.sleep(0.01)
        received = 1000
    assert "percent=100.0" in caplog.text.splitlines()[-1]
