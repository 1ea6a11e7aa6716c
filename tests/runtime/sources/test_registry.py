"""Models of OCI registries: ORAS and ModelPack artifacts, tokens, redirects, faults and hostile archives."""

import base64
import errno
import io
import json
import os
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_registry import TITLE, TOKEN, USER, FakeRegistry, digest_of, running_registry
from fake_source import Fault

from skiff_runtime.errors import ConfigError, FetchError
from skiff_runtime.sources.fetch import fetch_model, find_fetched
from skiff_runtime.transfer import parallel_download, retries

CHUNK = 100_000
WEIGHTS = bytes(i * i % 251 for i in range(3 * CHUNK + 17))
FILES = {"config.json": b'{"architectures": []}', "tokenizer.json": b"{}", "model.safetensors": WEIGHTS}
MODELPACK = "application/vnd.cncf.model"


def titled(name: str, content: bytes) -> dict[str, Any]:
    """Return a layer as ``oras push`` makes it."""
    media_type = "application/vnd.oci.image.layer.v1.tar"
    return {"mediaType": media_type, "annotations": {TITLE: name}, "content": content}


def packed(members: dict[str, bytes | tarfile.TarInfo], mode: Any = "w:gz") -> bytes:
    """Return a tar archive."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as tar:
        for name, content in members.items():
            if isinstance(content, tarfile.TarInfo):
                tar.addfile(content)
                continue
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(retries, "BASE_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(parallel_download, "CHUNK_BYTES", CHUNK)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.delenv("DOCKER_AUTH_CONFIG", raising=False)


@pytest.fixture
def registry() -> Iterator[FakeRegistry]:
    with running_registry() as running:
        running.push("org/llama:v1", [titled(*each) for each in {**FILES, "evil.py": b"x"}.items()])
        yield running


def docker_config(host: str, user: str = USER) -> str:
    return json.dumps({"auths": {host: {"auth": base64.b64encode(user.encode()).decode()}}})


def assert_served(directory: Path, files: dict[str, bytes] = FILES) -> None:
    found = {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}
    assert found == {*files, ".skiff.json"}
    for name, content in files.items():
        assert (directory / name).read_bytes() == content, name


def test_titled_layers_are_the_files(registry: FakeRegistry, tmp_path: Path) -> None:
    uri = f"oci://{registry.host}/org/llama:v1"
    directory = fetch_model(uri, None, tmp_path / "cache")
    assert_served(directory)
    ranges = [seen.headers.get("range") for seen in registry.deliveries("model.safetensors")]
    assert len(ranges) >= 4 and f"bytes={3 * CHUNK}-{3 * CHUNK + 16}" in ranges
    assert not registry.deliveries("evil.py")
    registry.stop()
    assert fetch_model(uri, None, tmp_path / "cache") == find_fetched(uri, tmp_path / "cache") == directory


@pytest.mark.parametrize("by_endpoint", [False, True])
def test_private_artifact_by_digest_and_redirected_blobs(
    by_endpoint: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_registry(private=True, redirects=True) as registry:
        digest = registry.push("org/llama:v1", [titled(*each) for each in FILES.items()])
        name = "registry.example.com" if by_endpoint else registry.host
        if by_endpoint:
            monkeypatch.setenv("OCI_ENDPOINT", f"http://{registry.host}")
        monkeypatch.setenv("DOCKER_AUTH_CONFIG", docker_config(name))
        assert_served(fetch_model(f"oci://{name}/org/llama@{digest}", None, tmp_path / "cache"))
    stored = [seen for seen in registry.seen if seen.server == "storage"]
    assert len(stored) >= 6
    assert all("authorization" not in seen.headers for seen in stored)
    assert sum(seen.path.startswith("/token") for seen in registry.seen) == 1


def test_docker_config_file_has_the_credentials(tmp_path: Path) -> None:
    with running_registry(private=True) as registry:
        registry.push("org/llama:v1", [titled(*each) for each in FILES.items()])
        (tmp_path / "config.json").write_text(docker_config(f"http://{registry.host}/v1/"))
        assert_served(fetch_model(f"oci://{registry.host}/org/llama:v1", None, tmp_path / "cache"))


@pytest.mark.parametrize("ranges", [True, False])
def test_cut_connection_is_resumed_with_ranges_and_without(ranges: bool, tmp_path: Path) -> None:
    with running_registry(ranges=ranges) as registry:
        registry.push("org/llama:v1", [titled(*each) for each in FILES.items()])
        registry.faults["model.safetensors"] = [Fault(cut_after_bytes=70_000), Fault(status=503)]
        assert_served(fetch_model(f"oci://{registry.host}/org/llama:v1", None, tmp_path / "cache"))


def test_interrupted_fetch_starts_a_file_over_without_ranges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All chunks are complete, then the first is lost: the stream brings the others again, too."""

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    shards = {f"model-{number}.safetensors": WEIGHTS + bytes([number]) for number in range(4)}
    index = json.dumps({"weight_map": {name: name for name in shards}}).encode()
    files = {"config.json": b"{}", "model.safetensors.index.json": index, **shards}
    with running_registry(ranges=False) as registry:
        registry.push("org/llama:v1", [titled(*each) for each in files.items()])
        uri, cache = f"oci://{registry.host}/org/llama:v1", tmp_path / "cache"
        with monkeypatch.context() as disk, pytest.raises(FetchError, match="Input/output error"):
            disk.setattr(os, "fdatasync", lambda each: fail(each) if os.fstat(each).st_size > CHUNK else None)
            try:
                fetch_model(uri, None, cache)
            finally:
                for thread in threading.enumerate():
                    if thread.name == "fetch":
                        thread.join(10)
        parts = [path for path in cache.rglob("*.part") if path.stat().st_size == len(WEIGHTS) + 1]
        assert parts
        for part in parts:
            with part.open("r+b") as stream:
                stream.write(b"damaged!")
        assert_served(fetch_model(uri, None, cache), files)


def test_blob_that_is_damaged_once_is_downloaded_again(registry: FakeRegistry, tmp_path: Path) -> None:
    registry.faults["config.json"] = [Fault(corrupt=True)]
    registry.faults["model.safetensors"] = [Fault(corrupt=True)]
    assert_served(fetch_model(f"oci://{registry.host}/org/llama:v1", None, tmp_path / "cache"))


def test_folder_that_oras_packed_is_extracted(tmp_path: Path) -> None:
    annotations = {TITLE: "llama", "io.deis.oras.content.unpack": "true"}
    content = packed({f"llama/{name}": content for name, content in FILES.items()})
    layer = {"mediaType": "application/vnd.oci.image.layer.v1.tar+gzip", "annotations": annotations}
    with running_registry() as registry:
        registry.push("org/llama:v1", [{**layer, "content": content}])
        assert_served(fetch_model(f"oci://{registry.host}/org/llama:v1", None, tmp_path / "cache"))


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_modelpack_archives_are_extracted_without_their_folder(mode: str, tmp_path: Path) -> None:
    suffix = "tar" if mode == "w" else "tar+gzip"
    config = {f"llama/{name}": content for name, content in FILES.items() if name.endswith("json")}
    with running_registry() as registry:
        registry.push(
            "org/llama:v1",
            [
                {"mediaType": f"{MODELPACK}.weight.config.v1.{suffix}", "content": packed({**config, "llama/a.py": b""}, mode)},
                {"mediaType": f"{MODELPACK}.weight.v1.{suffix}", "content": packed({"llama/model.safetensors": WEIGHTS}, mode)},
                {"mediaType": f"{MODELPACK}.doc.v1.{suffix}", "content": b"no archive at all"},
            ],
        )  # fmt: skip
        directory = fetch_model(f"oci://{registry.host}/org/llama:v1", None, tmp_path / "cache")
    assert_served(directory)
    assert {path.name for path in directory.parent.iterdir()} == {"lock", "model"}


def test_raw_modelpack_layers_are_named_by_their_path(tmp_path: Path) -> None:
    layers = [
        {
            "mediaType": f"{MODELPACK}.weight.v1.raw",
            "annotations": {"org.cncf.model.filepath": f"llama/{name}"},
            "content": content,
        }
        for name, content in FILES.items()
    ]
    with running_registry() as registry:
        registry.push("org/llama:v1", layers)
        assert_served(fetch_model(f"oci://{registry.host}/org/llama:v1", None, tmp_path / "cache"))


def link(name: str, target: str, kind: bytes) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


HOSTILE = [
    ({"../config.json": b"{}"}, "may not leave its folder"),
    ({"/etc/config.json": b"{}"}, "may not leave its folder"),
    ({"a/../../config.json": b"{}"}, "may not leave its folder"),
    ({"config.json": link("config.json", "/etc/passwd", tarfile.SYMTYPE)}, "as a link or a device"),
    ({"config.json": link("config.json", "/etc/passwd", tarfile.LNKTYPE)}, "as a link or a device"),
    ({"config.json": link("config.json", "", tarfile.FIFOTYPE)}, "as a link or a device"),
]


@pytest.mark.parametrize(("members", "message"), HOSTILE)
def test_hostile_archives_are_refused(members: Any, message: str, tmp_path: Path) -> None:
    before = set(tmp_path.iterdir())
    with running_registry() as registry:
        layer = {"mediaType": f"{MODELPACK}.weight.v1.tar+gzip", "content": packed(members)}
        registry.push("org/llama:v1", [layer])
        with pytest.raises(FetchError, match=message):
            fetch_model(f"oci://{registry.host}/org/llama:v1", None, tmp_path / "cache")
    assert set(tmp_path.iterdir()) - before == {tmp_path / "cache"}


def test_damaged_and_huge_archives_are_refused(tmp_path: Path) -> None:
    cut = packed({"model.safetensors": bytes(range(256)) * 400})[:-60]
    with running_registry() as registry:
        registry.push("org/llama:v1", [{"mediaType": f"{MODELPACK}.weight.v1.tar+gzip", "content": cut}])
        with pytest.raises(FetchError, match="not a readable tar archive"):
            fetch_model(f"oci://{registry.host}/org/llama:v1", None, tmp_path / "cache")
        huge = tarfile.TarInfo("model.safetensors")
        huge.size = 1 << 60
        content = huge.tobuf() + bytes(1024)
        registry.push("org/llama:v2", [{"mediaType": f"{MODELPACK}.weight.v1.tar", "content": content}])
        with pytest.raises(FetchError, match=r"not enough space in .* for model.safetensors"):
            fetch_model(f"oci://{registry.host}/org/llama:v2", None, tmp_path / "cache")


def test_failures_say_what_to_do(
    registry: FakeRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failure(uri: str) -> str:
        with pytest.raises(FetchError) as caught:
            fetch_model(uri, None, tmp_path / "cache")
        return str(caught.value)

    base = f"oci://{registry.host}/org/llama"
    assert "has no v2 of" in failure(f"{base}:v2") and "correct the repository or the tag" in failure(
        f"{base}:v2"
    )
    image = {"mediaType": "application/vnd.oci.image.layer.v1.tar+gzip", "content": b"root"}
    registry.push("org/llama:image", [image])
    assert "container images are not read" in failure(f"{base}:image")
    registry.push("org/llama:up", [titled("../config.json", b"{}")])
    assert "may not leave its folder" in failure(f"{base}:up")
    registry.push("org/llama:zstd", [{"mediaType": f"{MODELPACK}.weight.v1.tar+zstd", "content": b"z"}])
    assert "push it as tar or tar+gzip" in failure(f"{base}:zstd")
    registry.push("org/llama:twice", [titled("config.json", b"{}"), titled("config.json", b"{ }")])
    assert "two layers of the name config.json" in failure(f"{base}:twice")
    registry.push("org/llama:many", [], manifests=[{"digest": "a"}, {"digest": "b"}])
    assert "an index of 2 manifests" in failure(f"{base}:many")
    registry.faults["manifest"] = [Fault(body=b"<html>")]
    assert "does not answer like a registry" in failure(f"{base}:v1")
    registry.faults["manifest"] = [Fault(body=b"{}")]
    pinned = registry.push("org/llama:v9", [titled(*each) for each in FILES.items()])
    assert "another digest" in failure(f"{base}@{pinned}")
    registry.faults["manifest"] = [Fault(status=503)] * 5
    assert "gave up after 5 attempts" in failure(f"{base}:v1")
    assert digest_of(b"{}") not in failure(f"oci://{registry.host}/org/other:v1")


def test_credentials_are_named_and_never_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_registry(private=True) as registry:
        registry.push("org/llama:v1", [titled(*each) for each in FILES.items()])
        uri = f"oci://{registry.host}/org/llama:v1"
        for text, message in (
            (docker_config("elsewhere:1"), r"refuses .* \(401\).*kubernetes.io/dockerconfigjson"),
            (docker_config(registry.host, "other:word-of-other"), "DOCKER_AUTH_CONFIG may not read it"),
            (json.dumps({"auths": {registry.host: {"auth": "!!"}}}), "not a Docker configuration"),
            ("word-of-other", "not a Docker configuration"),
        ):
            monkeypatch.setenv("DOCKER_AUTH_CONFIG", text)
            with pytest.raises(FetchError, match=message) as failure:
                fetch_model(uri, None, tmp_path / "cache")
            assert "word-of" not in str(failure.value) and TOKEN not in str(failure.value)


@pytest.mark.parametrize(
    "uri",
    ["oci://", "oci://ghcr.io", "oci://ghcr.io/", "oci://ghcr.io/Org/x:v1", "oci://ghcr.io/a/../b:v1", "oci://h/a:b:c",
     "oci://user@host/a:b", "oci://ghcr.io/a@sha256:12"],
)  # fmt: skip
def test_malformed_uris_are_refused(uri: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="write oci://REGISTRY/REPOSITORY:TAG"):
        fetch_model(uri, None, tmp_path)
