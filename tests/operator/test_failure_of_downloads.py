"""The causes of failed downloads, from the messages that the runtime's own code raises against fake sources."""

import ast
import base64
import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import httpx2
import pytest
from fake_registry import TITLE, running_registry
from fake_s3 import FakeS3, running_s3
from fake_source import Fault
from pki import Authority

from skiff_operator.failure import diagnose
from skiff_operator.redact import redact
from skiff_runtime.errors import FetchError
from skiff_runtime.sources import directory_cache, model_source, object_store, registry
from skiff_runtime.sources.fetch import fetch_model
from skiff_runtime.transfer import retries

RUNTIME = Path(__file__).parents[2] / "runtime/skiff_runtime"
URI = "s3://models/llama"
WEIGHTS = "model.safetensors"
NOWHERE = "http://127.0.0.1:1"
MODELPACK = "application/vnd.cncf.model.weight.v1"
CLASSLESS: Final = (
    "2",  # the failures of all peers, behind which the source itself is read
    "2: 2",  # an answer of a store that nothing else describes
    "2: stopped",  # the other threads, after the one that failed
    "2: stopped while waiting to try again",
    "2: 2; gave up after 2 attempts",  # the reason of the last attempt, which has a class
)
"""Messages of the sources that have no class of their own."""


def diagnosed(message: str) -> tuple[str, str]:
    """Return reason and remedy of a download that ends with this message, as it passes through redaction."""
    line = f"2026-11-24T20:29:06.974Z error fetch fetch_failed model={URI} message={json.dumps(message)}\n"
    found = diagnose("fetch", exit_code=5, reason="Error", log_tail=redact(line))
    return found.reason, found.remedy


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(retries, "BASE_WAIT_SECONDS", 0.001)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKSKIFF")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "skiff-secret-access-key")
    monkeypatch.setenv("GOOGLE_SKIP_SIGNATURE", "true")
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))


@contextmanager
def answering(
    status: int, body: str = "", *, headers: dict[str, str] | None = None, certificate: Path | None = None
) -> Iterator[str]:
    """Run a server that answers every request alike, and yield its address."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

        def do_GET(self) -> None:
            self.send_response(status)
            for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body.encode())

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield f"http{'s' if certificate else ''}://localhost:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeS3]:
    """A bucket with a model, and one with a GGUF file."""
    for name in ("models/llama/config.json", f"models/llama/{WEIGHTS}", "models/gguf/a.gguf"):
        path = tmp_path / "store" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    with running_s3(tmp_path / "store", access_key="AKSKIFF") as running:
        monkeypatch.setenv("AWS_ENDPOINT_URL", running.url)
        yield running


def failure(uri: str, tmp_path: Path) -> str:
    with pytest.raises(FetchError) as caught:
        fetch_model(uri, None, tmp_path / "cache")
    return str(caught.value)


STORES: list[tuple[str, str, dict[str, str], dict[str, Any], str, str]] = [
    ("the bucket does not exist", "s3://nowhere/llama", {}, {}, "ModelNotFound", "spec.model.uri"),
    ("the prefix is empty", "s3://models/other", {}, {}, "ModelNotFound", "spec.model.uri"),
    ("a file has gone", URI, {}, {"status": 404}, "ModelNotFound", "spec.model.uri"),
    ("unknown key", URI, {"AWS_ACCESS_KEY_ID": "AKOTHER"}, {}, "InvalidCredentials", "spec.model.credentialsSecretRef"),
    ("malformed key", "gs://models/llama", {"GOOGLE_SERVICE_ACCOUNT_KEY": "{}"}, {}, "InvalidCredentials", "spec.model.credentialsSecretRef"),
    ("no right", URI, {}, {"status": 403}, "AccessDenied", "spec.model.credentialsSecretRef"),
    ("the store fails", URI, {}, {"status": 500}, "SourceUnreachable", "spec.model.endpoint"),
    ("connections break", URI, {}, {"cut_after_bytes": 0}, "SourceUnreachable", "spec.model.endpoint"),
    ("the store is down", URI, {"AWS_ENDPOINT_URL": NOWHERE}, {}, "SourceUnreachable", "spec.model.endpoint"),
    ("the file was replaced", URI, {}, {"status": 412}, "SourceChanged", "spec.model.uri"),
    ("the file was cut", URI, {}, {"status": 416}, "SourceChanged", "spec.model.uri"),
    ("the file is damaged", URI, {}, {"corrupt": True}, "ChecksumMismatch", "spec.model.uri"),
    ("only GGUF", "s3://models/gguf", {}, {}, "UnsupportedModel", "Serve a model"),
]  # fmt: skip


@pytest.mark.parametrize(("uri", "environ", "fault", "reason", "remedy"), [each[1:] for each in STORES], ids=[each[0] for each in STORES])  # fmt: skip
def test_failures_of_object_stores(
    store: FakeS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str, environ: dict[str, str],
    fault: dict[str, Any], reason: str, remedy: str,
) -> None:  # fmt: skip
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    store.faults[WEIGHTS] = [Fault(**fault)] * 20 if fault else []
    message = failure(uri, tmp_path)
    assert (diagnosed(message)[0], remedy in diagnosed(message)[1]) == (reason, True), message


def test_missing_credentials_of_a_store(
    store: FakeS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{NOWHERE}/credentials")
    reason, remedy = diagnosed(failure(URI, tmp_path))
    assert reason == "NoCredentials" and "spec.model.credentialsSecretRef" in remedy


def error_of_s3(code: str) -> str:
    return f"<Error><Code>{code}</Code><Message>text</Message></Error>"


ANSWERS: list[tuple[str, int, str, dict[str, str], str, str]] = [
    (URI, 301, error_of_s3("PermanentRedirect"), {}, "WrongRegion", "AWS_REGION in spec.runtime.env"),
    (URI, 400, error_of_s3("AuthorizationHeaderMalformed"), {}, "WrongRegion", "AWS_REGION in spec.runtime.env"),
    (URI, 400, error_of_s3("ExpiredToken"), {}, "InvalidCredentials", "spec.model.credentialsSecretRef"),
    (URI, 403, error_of_s3("SignatureDoesNotMatch"), {}, "InvalidCredentials", "spec.model.credentialsSecretRef"),
    (URI, 200, "<!doctype html><meta charset=utf-8>", {}, "UnexpectedResponse", "spec.model.endpoint"),
    ("gs://models/llama", 301, "", {}, "UnexpectedResponse", "spec.model.endpoint"),
    ("oci://r.example.com/org/llama", 200, "<html>Sign in</html>", {}, "UnexpectedResponse", "spec.model.endpoint"),
    ("oci://r.example.com/org/llama", 400, "", {}, "UnexpectedResponse", "spec.model.endpoint"),
    ("oci://r.example.com/org/llama", 401, "", {"WWW-Authenticate": "Negotiate x"}, "UnexpectedResponse", "spec.model.endpoint"),
    ("oci://r.example.com/org/llama", 401, "", {"WWW-Authenticate": "Basic realm=x"}, "NoCredentials", "spec.model.credentialsSecretRef"),
    ("oci://r.example.com/org/llama", 503, "", {}, "SourceUnreachable", "spec.model.endpoint"),
]  # fmt: skip


@pytest.mark.parametrize(("uri", "status", "body", "headers", "reason", "remedy"), ANSWERS)
def test_failures_by_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str, status: int, body: str, headers: dict[str, str],
    reason: str, remedy: str,
) -> None:  # fmt: skip
    with answering(status, body, headers=headers) as address:
        for name in ("AWS_ENDPOINT_URL", "GOOGLE_BASE_URL", "OCI_ENDPOINT"):
            monkeypatch.setenv(name, address)
        message = failure(uri, tmp_path)
    assert (diagnosed(message)[0], remedy in diagnosed(message)[1]) == (reason, True), message


@pytest.mark.parametrize("uri", [URI, "gs://models/llama", "oci://r.example.com/org/llama"])
def test_a_certificate_that_is_not_trusted(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The remedy helps: with the authority in SSL_CERT_FILE, the answer of the server is read."""
    authority = Authority(tmp_path / "pki")
    authority.create()
    authority.issue("server", "/CN=localhost", "DNS:localhost")
    certificate = tmp_path / "server.pem"
    certificate.write_text("".join((tmp_path / f"pki/server.{part}").read_text() for part in ("key", "crt")))
    with answering(404, certificate=certificate) as address:
        for name in ("AWS_ENDPOINT_URL", "GOOGLE_BASE_URL", "OCI_ENDPOINT"):
            monkeypatch.setenv(name, address)
        reason, remedy = diagnosed(failure(uri, tmp_path))
        assert reason == "TLSFailed" and "SSL_CERT_FILE in spec.runtime.env" in remedy
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificate))
        assert diagnosed(failure(uri, tmp_path))[0] == "ModelNotFound"


def test_a_registry_that_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_TIMEOUT", httpx2.Timeout(0.02))
    with ThreadingHTTPServer(
        ("127.0.0.1", 0), BaseHTTPRequestHandler
    ) as server:  # accepts, and never answers
        uri = f"oci://localhost:{server.server_address[1]}/org/llama"
        assert diagnosed(failure(uri, tmp_path))[0] == "SourceUnreachable"


def titled(name: str, content: bytes = b"{}") -> dict[str, Any]:
    """Return a layer as `oras push` makes it."""
    media_type = "application/vnd.oci.image.layer.v1.tar"
    return {"mediaType": media_type, "annotations": {TITLE: name}, "content": content}


def packed(kind: str, content: bytes = b"z") -> dict[str, Any]:
    return {"mediaType": f"{MODELPACK}.{kind}", "content": content}


ARTIFACTS: list[tuple[list[dict[str, Any]], dict[str, Any], str, str]] = [
    ([{"mediaType": "application/vnd.oci.image.layer.v1.tar", "content": b""}], {}, "UnsupportedArtifact", "oras"),
    ([packed("tar+zstd")], {}, "UnsupportedArtifact", "tar+gzip"),
    ([packed("tar+gzip")], {}, "UnsupportedArtifact", "Push the model again"),
    ([titled("../config.json")], {}, "UnsupportedArtifact", "Push the model again"),
    ([titled("config.json"), titled("config.json", b"{ }")], {}, "UnsupportedArtifact", "Push the model again"),
    ([], {"manifests": [{"digest": "a"}, {"digest": "b"}]}, "InvalidModelURI", "by its digest"),
    ([], {"manifests": [1]}, "UnexpectedResponse", "spec.model.endpoint"),
]  # fmt: skip


@pytest.mark.parametrize(("layers", "manifest", "reason", "remedy"), ARTIFACTS)
def test_artifacts_that_are_refused(
    tmp_path: Path, layers: list[dict[str, Any]], manifest: dict[str, Any], reason: str, remedy: str
) -> None:
    with running_registry() as running:
        running.push("org/llama:v1", [dict(layer) for layer in layers], **manifest)
        message = failure(f"oci://{running.host}/org/llama:v1", tmp_path)
        assert (diagnosed(message)[0], remedy in diagnosed(message)[1]) == (reason, True), message
        assert diagnosed(failure(f"oci://{running.host}/org/llama:v2", tmp_path))[0] == "ModelNotFound"


@pytest.mark.parametrize(
    ("user", "reason"),
    [("", "NoCredentials"), ("other:word", "AccessDenied"), ("no-colon", "InvalidCredentials")],
)
def test_credentials_of_a_registry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: str, reason: str
) -> None:
    with running_registry(private=True) as running:
        if user:
            entry = {"auth": base64.b64encode(user.encode()).decode()}
            monkeypatch.setenv("DOCKER_AUTH_CONFIG", json.dumps({"auths": {running.host: entry}}))
        found, remedy = diagnosed(failure(f"oci://{running.host}/org/llama", tmp_path))
    assert found == reason and "spec.model.credentialsSecretRef" in remedy


LIMITS: list[tuple[Any, str, int, str]] = [
    (object_store, "MAX_FILES", 1, "InvalidModelURI"),
    (model_source, "MAX_FILES", 1, "InvalidModelURI"),
    (directory_cache, "SPARE_BYTES", 1 << 60, "DiskFull"),
]


@pytest.mark.parametrize(("module", "name", "limit", "reason"), LIMITS)
def test_limits(
    store: FakeS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, limit: int, reason: str
) -> None:  # fmt: skip
    monkeypatch.setattr(module, name, limit)
    message = failure(URI, tmp_path)
    assert diagnosed(message)[0] == reason, message


SAMPLES: Final = {
    "status": {"FetchError": "403", "TransientSourceError": "503"},
    "answer": {"FetchError": "404 NoSuchBucket", "TransientSourceError": "503 SlowDown"},
}
"""Values of expressions in messages that the classes depend on; any other is a 2."""


def messages() -> Iterator[str]:
    """Yield each message in the code of the sources, with samples of the values."""
    for path in sorted([*(RUNTIME / "sources").glob("*.py"), *(RUNTIME / "transfer").glob("*.py")]):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "FetchError",
                "TransientSourceError",
            ):
                yield text_of(node.args[0], ast.unparse(node.func))


def text_of(message: ast.expr, error: str) -> str:
    text = ""
    for part in message.values if isinstance(message, ast.JoinedStr) else [message]:
        if isinstance(part, ast.Constant):
            text += str(part.value)
        else:
            value = part.value if isinstance(part, ast.FormattedValue) else part
            text += SAMPLES.get(ast.unparse(value), {}).get(error, "2")
    return text


def test_every_message_of_the_sources_has_a_class() -> None:
    """A message that is added or changed in the runtime fails here until `failure.py` knows it."""
    found = list(messages())
    assert len(found) > 40
    assert {each for each in found if diagnosed(each)[0] == "WeightsDownloadFailed"} == set(CLASSLESS)
