"""``skiff fetch`` from real servers on this machine: versitygw's S3, which checks signatures, and distribution's registry."""

import base64
import hashlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from free_port import free_port
from kube import tool, wait

from skiff_runtime import demo
from skiff_runtime.contract import EXIT_FETCH_FAILED, EXIT_OK

KEY, SECRET = "skiff-access-key", "skiff-secret-key"
WEIGHT_BYTES = 40 << 20
MANIFEST = "application/vnd.oci.image.manifest.v1+json"


@contextmanager
def running(command: list[str], port: int, log: Path, **environment: str) -> Iterator[None]:
    """Run a server for the length of a with-block."""

    def listens() -> bool:
        assert server.poll() is None, log.read_text()
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", port)) == 0

    with log.open("w") as output:
        server = subprocess.Popen(
            command, env={**os.environ, **environment}, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        wait(listens, timeout_seconds=30, explain=log.read_text, poll_seconds=0.05)
        yield
    finally:
        server.kill()
        server.wait()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The demo model's small files, with weights of several chunks."""
    names = ("config.json", "tokenizer.json")
    weights = hashlib.shake_256(b"weights").digest(WEIGHT_BYTES)
    return {**{name: (demo.DIRECTORY / name).read_bytes() for name in names}, "model.safetensors": weights}


def fetch(uri: str, cache: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run the command as a pod does."""
    command = [sys.executable, "-m", "skiff_runtime", "fetch", "--model", uri, "--download-dir", str(cache)]
    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120, check=False
    )


def assert_served(done: "subprocess.CompletedProcess[str]", model: dict[str, bytes]) -> None:
    assert done.returncode == EXIT_OK, done.stderr
    directory = Path(done.stdout.strip())
    assert {path.name for path in directory.iterdir()} == {*model, ".skiff.json"}
    for name, content in model.items():
        assert (directory / name).read_bytes() == content, name


def test_s3_with_signatures_that_are_checked(tmp_path: Path, model: dict[str, bytes]) -> None:
    folder, port = tmp_path / "buckets", free_port()
    (folder / "models/llama").mkdir(parents=True)
    for name, content in model.items():
        (folder / "models/llama" / name).write_bytes(content)
    command = [tool("versitygw-path"), "--port", f"127.0.0.1:{port}", "posix", str(folder)]
    access = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
    }
    with running(command, port, tmp_path / "log", ROOT_ACCESS_KEY=KEY, ROOT_SECRET_KEY=SECRET):
        refused = fetch("s3://models/llama", tmp_path / "cache", **{**access, "AWS_SECRET_ACCESS_KEY": "x"})
        assert refused.returncode == EXIT_FETCH_FAILED
        assert "403 SignatureDoesNotMatch" in refused.stderr and KEY not in refused.stderr
        unsigned = fetch("s3://models/llama", tmp_path / "cache", **access, AWS_SKIP_SIGNATURE="true")
        assert unsigned.returncode == EXIT_FETCH_FAILED and "AccessDenied" in unsigned.stderr
        missing = fetch("s3://absent/llama", tmp_path / "cache", **access)
        assert "there is no bucket absent (404 NoSuchBucket)" in missing.stderr
        assert_served(fetch("s3://models/llama", tmp_path / "cache", **access), model)


def push(client: httpx.Client, repository: str, tag: str, files: dict[str, bytes]) -> str:
    """Push an artifact of titled layers, as oras does, and return its digest."""

    def upload(content: bytes) -> dict[str, Any]:
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        session = client.post(f"/v2/{repository}/blobs/uploads/").raise_for_status()
        where = httpx.URL(session.headers["Location"]).copy_merge_params({"digest": digest})
        client.put(where, content=content).raise_for_status()
        return {"mediaType": "application/octet-stream", "digest": digest, "size": len(content)}

    config = upload(b"{}") | {"mediaType": "application/vnd.oci.empty.v1+json"}
    layers = [
        upload(content) | {"annotations": {"org.opencontainers.image.title": name}}
        for name, content in files.items()
    ]
    body = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "artifactType": "application/vnd.cncf.model.manifest.v1+json",
            "config": config,
            "layers": layers,
        }
    ).encode()
    url = f"/v2/{repository}/manifests/{tag}"
    answer = client.put(url, content=body, headers={"Content-Type": MANIFEST}).raise_for_status()
    digest: str = answer.headers["Docker-Content-Digest"]
    return digest


def test_registry_with_a_password(tmp_path: Path, model: dict[str, bytes]) -> None:
    port = free_port()
    # bcrypt of "password", as htpasswd writes it
    entry = "reader:$2y$05$c4WoMPo3SXsafkva.HHa6uyvdTqVqeGuuv76QmS.t1ryNDtvJiOyS\n"
    (tmp_path / "htpasswd").write_text(entry)
    config = {
        "version": 0.1,
        "log": {"level": "error"},
        "storage": {"filesystem": {"rootdirectory": str(tmp_path / "registry")}},
        "http": {"addr": f"127.0.0.1:{port}"},
        "auth": {"htpasswd": {"realm": "skiff", "path": str(tmp_path / "htpasswd")}},
    }
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    command = [tool("registry-path"), "serve", str(tmp_path / "config.yaml")]
    host = f"localhost:{port}"
    login = base64.b64encode(b"reader:password").decode()
    access = {"DOCKER_AUTH_CONFIG": json.dumps({"auths": {host: {"auth": login}}})}
    with running(command, port, tmp_path / "log"):
        with httpx.Client(
            base_url=f"http://127.0.0.1:{port}", auth=("reader", "password"), timeout=60
        ) as client:
            digest = push(client, "org/llama", "v1", model)
        refused = fetch(f"oci://{host}/org/llama:v1", tmp_path / "cache", DOCKER_CONFIG=str(tmp_path))
        assert refused.returncode == EXIT_FETCH_FAILED and "(401)" in refused.stderr
        missing = fetch(f"oci://{host}/org/llama:v2", tmp_path / "cache", **access)
        assert missing.returncode == EXIT_FETCH_FAILED and "has no v2 of" in missing.stderr
        assert login not in refused.stderr + missing.stderr
        assert_served(fetch(f"oci://{host}/org/llama:v1", tmp_path / "cache", **access), model)
        assert_served(fetch(f"oci://{host}/org/llama@{digest}", tmp_path / "cache", **access), model)
