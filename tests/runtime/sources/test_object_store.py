"""Models of S3 and Google Cloud Storage: complete, parallel, resumed, verified, and refused by name."""

import contextlib
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_s3 import LISTING, FakeS3, running_s3_of_environment
from fake_source import Fault

from skiff_runtime.contract import EXIT_FETCH_FAILED, EXIT_OK
from skiff_runtime.errors import ConfigError, FetchError
from skiff_runtime.hub.model_cache import SPARE_BYTES
from skiff_runtime.sources import object_store
from skiff_runtime.sources.fetch import fetch_model, find_fetched
from skiff_runtime.transfer import parallel_download, retries

URI = "s3://models/llama/tiny"
CHUNK = 100_000
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
SERVED = {
    "config.json",
    "tokenizer.json",
    "1_Pooling/config.json",
    "model.safetensors.index.json",
    FIRST,
    SECOND,
}
SECRET = "skiff-secret-access-key"


def write_model(folder: Path) -> Path:
    """Write a model beside files that serving does not need."""
    (folder / "1_Pooling").mkdir(parents=True)
    (folder / "onnx").mkdir()
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "1_Pooling/config.json").write_text("{}")
    index = {"weight_map": {"a": FIRST, "b": SECOND}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for seed, name in enumerate((FIRST, SECOND)):
        (folder / name).write_bytes(bytes((seed + i * i) % 251 for i in range(5 * CHUNK + 17)))
    for name in ("README.md", "pytorch_model.bin", "consolidated.safetensors", "onnx/model.onnx"):
        (folder / name).write_text("not wanted")
    return folder


@pytest.fixture(autouse=True)
def no_metadata_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "store" / "models" / "llama" / "tiny")


@pytest.fixture
def store(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeS3]:
    monkeypatch.setattr(retries, "BASE_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(parallel_download, "CHUNK_BYTES", CHUNK)
    with running_s3_of_environment(tmp_path / "store", monkeypatch, secret=SECRET) as running:
        yield running


def assert_served(directory: Path, model: Path) -> None:
    files = {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}
    assert files == SERVED | {".skiff.json"}
    for name in SERVED:
        assert (directory / name).read_bytes() == (model / name).read_bytes(), name


def test_only_files_that_serving_needs_are_downloaded_and_nothing_else_is_left(
    store: FakeS3, model: Path, tmp_path: Path
) -> None:
    directory = fetch_model(URI, None, tmp_path / "cache")
    assert_served(directory, model)
    assert {path.name for path in directory.parent.iterdir()} == {"lock", "model"}
    assert len(store.deliveries(FIRST)) == 6


def test_streams_are_parallel_and_bounded(store: FakeS3, model: Path, tmp_path: Path) -> None:
    store.bytes_per_second = 2_000_000
    assert_served(fetch_model(URI, None, tmp_path / "cache"), model)
    assert 2 <= store.most_streams <= parallel_download.STREAMS


def test_complete_model_needs_no_network_even_if_the_bucket_has_changed(
    store: FakeS3, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    assert find_fetched(URI, cache) is None
    first = fetch_model(URI, None, cache)
    seen = len(store.seen)
    (model / "config.json").write_text("{}")
    assert fetch_model(URI, None, cache) == find_fetched(URI, cache) == first
    assert len(store.seen) == seen
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    assert find_fetched(URI, cache) is None, "the bucket of another service is another model"


def test_damaged_model_is_repaired(store: FakeS3, model: Path, tmp_path: Path) -> None:
    directory = fetch_model(URI, None, tmp_path / "cache")
    (directory / SECOND).write_bytes(b"short")
    assert_served(fetch_model(URI, None, tmp_path / "cache"), model)


def test_cut_connection_goes_on_where_it_ended(
    store: FakeS3, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "PIECE_BYTES", 10_000)
    store.faults[FIRST] = [Fault(cut_after_bytes=70_000), Fault(cut_after_bytes=0)]
    assert_served(fetch_model(URI, None, tmp_path / "cache"), model)
    starts = [seen.headers["range"].partition("-")[0] for seen in store.deliveries(FIRST)]
    assert len(starts) == 8
    assert sum(int(start.removeprefix("bytes=")) % CHUNK > 0 for start in starts) == 1


def test_transient_answers_are_retried(store: FakeS3, model: Path, tmp_path: Path) -> None:
    store.faults[LISTING] = [Fault(status=503), Fault(status=429)]
    store.faults[SECOND] = [Fault(status=500), Fault(status=503)]
    assert_served(fetch_model(URI, None, tmp_path / "cache"), model)


def test_file_that_is_damaged_once_is_downloaded_again(store: FakeS3, model: Path, tmp_path: Path) -> None:
    store.faults[FIRST] = [Fault(corrupt=True)]
    assert_served(fetch_model(URI, None, tmp_path / "cache"), model)
    assert len(store.deliveries(FIRST)) == 12


def test_file_that_stays_damaged_is_never_served(store: FakeS3, tmp_path: Path) -> None:
    store.faults[SECOND] = [Fault(corrupt=True)] * 12
    with pytest.raises(FetchError, match=r"checksum mismatch after 2 downloads.*md5:"):
        fetch_model(URI, None, tmp_path / "cache")
    assert find_fetched(URI, tmp_path / "cache") is None
    assert not list((tmp_path / "cache").glob("*/model"))


def test_object_that_changes_during_the_download_is_not_mixed(
    store: FakeS3, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel_download, "STREAMS", 1)
    store.multipart.add(FIRST)  # no checksum: the entity tag alone protects it
    change = Fault(before=lambda: (model / FIRST).write_bytes(b"another" * 90_000))
    store.faults[FIRST] = [Fault(), change]
    with pytest.raises(FetchError, match="changed during the download"):
        fetch_model(URI, None, tmp_path / "cache")
    assert len(store.deliveries(FIRST)) == 2
    assert find_fetched(URI, tmp_path / "cache") is None


@pytest.mark.parametrize(
    ("uri", "faults", "message"),
    [
        ("s3://nowhere/llama", {}, "there is no bucket nowhere .404 NoSuchBucket.; correct the name"),
        ("s3://models/other", {}, "has no objects: check the bucket and the prefix"),
        (URI, {FIRST: [Fault(status=403)] * 9}, "refused .403 AccessDenied.*s3:GetObject"),
        (URI, {FIRST: [Fault(status=404)] * 9}, f"the store has no {FIRST}"),
        (URI, {FIRST: [Fault(status=500)] * 40}, "answered 500 InternalError; gave up after 5 attempts"),
    ],
)
def test_failures_say_what_to_do(
    store: FakeS3, tmp_path: Path, uri: str, faults: dict[str, list[Fault]], message: str
) -> None:
    store.faults.update(faults)
    with pytest.raises(FetchError, match=message) as failure:
        fetch_model(uri, None, tmp_path / "cache")
    assert SECRET not in str(failure.value) and "AKSKIFF" not in str(failure.value)


def test_wrong_and_missing_credentials_are_named(
    store: FakeS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKOTHER")
    with pytest.raises(FetchError, match=r"403 InvalidAccessKeyId.*credentialsSecretRef") as failure:
        fetch_model(URI, None, tmp_path / "cache")
    assert "AKOTHER" not in str(failure.value)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", "http://127.0.0.1:1/credentials")
    with pytest.raises(FetchError, match=r"credentialsSecretRef|no answer from the store"):
        fetch_model(URI, None, tmp_path / "cache")


def test_google_cloud_storage(
    store: FakeS3, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.access_key = None
    monkeypatch.setenv("GOOGLE_BASE_URL", store.url)
    monkeypatch.setenv("GOOGLE_SKIP_SIGNATURE", "true")
    assert_served(fetch_model("gs://models/llama/tiny", None, tmp_path / "cache"), model)
    with pytest.raises(FetchError, match="there is no bucket nowhere"):
        fetch_model("gs://nowhere/llama", None, tmp_path / "cache")


@pytest.mark.parametrize(
    "uri", ["s3://", "s3://models/a/../b", "s3://models/a//b", "s3://Bucket/a", "gs://b/\n"]
)
def test_malformed_uris_are_refused(uri: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"write (s3|gs)://BUCKET/PREFIX"):
        fetch_model(uri, None, tmp_path)


def test_settings_that_the_store_refuses_are_named_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", '{"private_key": "word-of-key"}')
    with pytest.raises(FetchError, match="the settings of the store are not usable") as failure:
        fetch_model("gs://models/llama", None, tmp_path / "cache")
    assert "word-of-key" not in str(failure.value)


def test_revisions_and_endpoints_with_a_password_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="--revision is for hf://"):
        fetch_model(URI, "main", tmp_path)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://user:password@host")
    with pytest.raises(ConfigError, match="AWS_ENDPOINT_URL must be") as failure:
        fetch_model(URI, None, tmp_path)
    assert "password@" not in str(failure.value)


def complete_chunks(cache: Path) -> int:
    """Count the entries of complete chunks in the journals; that of a complete file may be deleted meanwhile."""
    journals = b""
    for path in cache.rglob("*.journal"):
        with contextlib.suppress(FileNotFoundError):
            journals += path.read_bytes()
    return sum(1 for (entry,) in struct.iter_unpack("<Q", journals) if entry)


def test_chunk_that_was_damaged_on_the_disk_is_not_kept(store: FakeS3, model: Path, tmp_path: Path) -> None:
    """A journal may outlive the bytes that it describes, if a node lost power."""
    store.multipart.update((FIRST, SECOND))  # no checksum of the whole file would find it
    store.faults[SECOND] = [Fault(status=403)] * 6
    with pytest.raises(FetchError, match="403"):
        fetch_model(URI, None, tmp_path / "cache")
    for thread in threading.enumerate():
        if thread.name == "fetch":
            thread.join(10)
    parts = list((tmp_path / "cache").rglob("*.part"))
    assert parts
    for part in parts:
        part.write_bytes(bytes(part.stat().st_size))
    store.faults.clear()
    assert_served(fetch_model(URI, None, tmp_path / "cache"), model)


def test_resumption_needs_no_room_for_what_has_arrived(
    store: FakeS3, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel_download, "STREAMS", 1)
    store.faults[FIRST] = [Fault(), Fault(), Fault(), Fault(status=403)]
    with pytest.raises(FetchError, match="403"):
        fetch_model(URI, None, tmp_path / "cache")
    free = 2 * (model / FIRST).stat().st_size - 3 * CHUNK + SPARE_BYTES
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    assert_served(fetch_model(URI, None, tmp_path / "cache"), model)


def test_killed_fetch_is_resumed_by_the_next_one(store: FakeS3, model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    code = (
        "import sys; from skiff_runtime.transfer import parallel_download; "
        f"parallel_download.CHUNK_BYTES = {CHUNK}; "
        "from skiff_runtime.__main__ import main; sys.exit(main())"
    )
    command = [sys.executable, "-c", code, "fetch", "--model", URI, "--download-dir", str(cache)]

    def start() -> "subprocess.Popen[str]":
        return subprocess.Popen(
            command, env=os.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    store.bytes_per_second = 150_000
    first = start()
    deadline = time.monotonic() + 60
    while complete_chunks(cache) < 4:
        assert time.monotonic() < deadline and first.poll() is None
        time.sleep(0.05)
    first.send_signal(signal.SIGTERM)
    _, errors = first.communicate(timeout=60)
    assert first.returncode == EXIT_FETCH_FAILED and "interrupted" in errors
    assert not list(cache.glob("*/model"))
    store.bytes_per_second = 0
    before = len(store.deliveries(FIRST)) + len(store.deliveries(SECOND))
    second = start()
    output, errors = second.communicate(timeout=60)
    assert second.returncode == EXIT_OK, errors
    assert_served(Path(output.strip()), model)
    assert len(store.deliveries(FIRST)) + len(store.deliveries(SECOND)) - before <= 12 - 4
    assert "percent=100" in errors and SECRET not in errors
