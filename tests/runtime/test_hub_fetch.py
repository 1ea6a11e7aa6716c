"""Downloading from a hub: what arrives, what is resumed, what is reused."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import FakeHub, Fault, commit_of, running_hub

from skiff_runtime.contract import ENV_HUB_ENDPOINT, EXIT_FETCH_FAILED, EXIT_OK
from skiff_runtime.hub.client import HubAccess
from skiff_runtime.hub.fetch import fetch
from skiff_runtime.hub.listing import RemoteFile
from skiff_runtime.hub.progress import LogProgress
from skiff_runtime.hub.reference import HubReference, parse_reference
from skiff_runtime.hub.retry import RetryPolicy

WEIGHT_BYTES = 300_000
QUICK = RetryPolicy(attempts=3, base_seconds=0.01, longest_seconds=5.0)
REFERENCE = parse_reference("hf://acme/tiny")
SERVED = {
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
}


def write_model(directory: Path) -> Path:
    """A repository that also holds much that serving does not need."""
    model = directory / "acme" / "tiny"
    (model / "onnx").mkdir(parents=True)
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    index = {"weight_map": {"a": first, "b": second, "c": first}}
    (model / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (model / "generation_config.json").write_text("{}")
    (model / "tokenizer.json").write_text(json.dumps({"pad": "x" * 20_000}))
    (model / "tokenizer_config.json").write_text("{}")
    (model / "chat_template.jinja").write_text("{{ messages }}")
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    for seed, name in enumerate((first, second, "consolidated.safetensors")):
        (model / name).write_bytes(bytes((seed + i * i) % 251 for i in range(WEIGHT_BYTES)))
    for name in ("README.md", "pytorch_model.bin", "onnx/model.onnx", "onnx/config.json"):
        (model / name).write_text("not wanted")
    return model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "hub")


@pytest.fixture
def hub(model: Path) -> Iterator[FakeHub]:
    with running_hub(model.parent.parent) as running:
        yield running


def get(hub: FakeHub, cache: Path, reference: HubReference = REFERENCE, token: str | None = None) -> Path:
    return fetch(reference, cache, access=HubAccess(hub.url, token), retry=QUICK, progress=LogProgress())


def assert_served(snapshot: Path, model: Path) -> None:
    assert {path.name for path in snapshot.iterdir()} == SERVED | {".complete"}
    for name in SERVED:
        assert (snapshot / name).read_bytes() == (model / name).read_bytes(), name


def test_only_what_serving_needs_arrives_whole(hub: FakeHub, model: Path, tmp_path: Path) -> None:
    snapshot = get(hub, tmp_path / "cache")
    assert snapshot == tmp_path / "cache" / "models--acme--tiny" / "snapshots" / commit_of(model)
    assert_served(snapshot, model)
    assert not (snapshot.parent.parent / "partial").exists()


def test_a_single_weight_file_is_preferred_to_others(hub: FakeHub, model: Path, tmp_path: Path) -> None:
    for path in model.glob("model*"):
        path.unlink()
    (model / "model.safetensors").write_bytes(b"w" * WEIGHT_BYTES)
    snapshot = get(hub, tmp_path / "cache")
    assert [path.name for path in snapshot.glob("*.safetensors")] == ["model.safetensors"]


def test_a_complete_model_needs_no_network(model: Path, tmp_path: Path) -> None:
    with running_hub(model.parent.parent) as hub:
        first = get(hub, tmp_path / "cache")
    assert get(hub, tmp_path / "cache") == first
    by_commit = HubReference("acme", "tiny", commit_of(model))
    assert get(hub, tmp_path / "cache", by_commit) == first


def test_a_damaged_snapshot_is_repaired(hub: FakeHub, model: Path, tmp_path: Path) -> None:
    snapshot = get(hub, tmp_path / "cache")
    (snapshot / "model-00002-of-00002.safetensors").write_bytes(b"short")
    assert_served(get(hub, tmp_path / "cache"), model)
    assert len(hub.requests_for("model-00001-of-00002.safetensors")) == 2  # hub and storage, once


def test_a_cut_download_goes_on_where_it_stopped(hub: FakeHub, model: Path, tmp_path: Path) -> None:
    name = "model-00001-of-00002.safetensors"
    hub.faults[name] = [Fault(cut_after_bytes=100_000), Fault(cut_after_bytes=50_000)]
    assert_served(get(hub, tmp_path / "cache"), model)
    ranges = [seen.headers.get("range") for seen in hub.requests_for(name) if seen.server == "storage"]
    assert ranges == [None, "bytes=100000-", "bytes=150000-"]


def test_a_server_that_ignores_ranges_is_understood(hub: FakeHub, model: Path, tmp_path: Path) -> None:
    hub.faults["model-00001-of-00002.safetensors"] = [Fault(cut_after_bytes=70_000), Fault(ignore_range=True)]
    assert_served(get(hub, tmp_path / "cache"), model)


def test_a_file_damaged_once_is_fetched_again(hub: FakeHub, model: Path, tmp_path: Path) -> None:
    hub.faults["config.json"] = [Fault(corrupt=True)]
    hub.faults["model-00002-of-00002.safetensors"] = [Fault(corrupt=True)]
    assert_served(get(hub, tmp_path / "cache"), model)


def test_busy_answers_are_waited_out(hub: FakeHub, model: Path, tmp_path: Path) -> None:
    hub.faults["listing"] = [Fault(status=429, headers={"Retry-After": "1"}), Fault(status=503)]
    hub.faults["config.json"] = [Fault(status=503), Fault(status=502)]
    started = time.monotonic()
    assert_served(get(hub, tmp_path / "cache"), model)
    assert time.monotonic() - started >= 1.0  # Retry-After was kept


def test_the_token_stays_with_the_hub(model: Path, tmp_path: Path) -> None:
    with running_hub(model.parent.parent, token="hf_secret") as hub:
        assert_served(get(hub, tmp_path / "cache", token="hf_secret"), model)
    stored = [seen for seen in hub.seen if seen.server == "storage"]
    assert len(stored) == 3
    assert all("authorization" not in seen.headers for seen in stored)
    assert all(
        seen.headers["authorization"] == "Bearer hf_secret" for seen in hub.seen if seen.server == "hub"
    )


def test_fetches_at_a_time_share_one_download(hub: FakeHub, model: Path, tmp_path: Path) -> None:
    hub.bytes_per_second = 1_000_000
    results: list[Path] = []
    threads = [
        threading.Thread(target=lambda: results.append(get(hub, tmp_path / "cache"))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 4
    assert_served(results[0], model)
    deliveries = [seen for seen in hub.seen if seen.path.startswith("/acme") and seen.server == "storage"]
    assert len(deliveries) == 3  # tokenizer.json and two weight files, once each


class TestCommand:
    """``skiff fetch`` as an init container runs it."""

    def start(self, hub: FakeHub, cache: Path) -> "subprocess.Popen[str]":
        command = [
            sys.executable,
            "-m",
            "skiff_runtime",
            "fetch",
            "--model",
            "hf://acme/tiny",
            "--cache-dir",
            str(cache),
        ]
        environment = {**os.environ, ENV_HUB_ENDPOINT: hub.url, "HF_TOKEN": "hf_secret"}
        return subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def test_killed_midway_it_resumes(self, hub: FakeHub, model: Path, tmp_path: Path) -> None:
        cache = tmp_path / "cache"
        hub.bytes_per_second = 100_000
        first = self.start(hub, cache)
        partial = cache / "models--acme--tiny" / "partial"
        deadline = time.monotonic() + 60
        while not any(path.stat().st_size > 50_000 for path in partial.glob("model-*")):
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
        resumed = [seen.headers["range"] for seen in hub.seen if "range" in seen.headers]
        assert any(int(value.removeprefix("bytes=").rstrip("-")) >= 50_000 for value in resumed)
        assert "percent=100" in errors
        assert "hf_secret" not in errors and "signature" not in errors


def test_progress_is_logged_as_a_share_of_all(caplog: pytest.LogCaptureFixture) -> None:
    progress = LogProgress()
    with caplog.at_level("INFO", logger="skiff"):
        progress.begin([RemoteFile("a", 750, "sha256", "0" * 64), RemoteFile("b", 250, "sha256", "1" * 64)])
        progress.update("a", 500)
        progress.close()
    assert "percent=50.0" in caplog.text
