"""API keys and CORS: keys authenticate requests, other origins are limited, every response has a request ID."""

import base64
import hashlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from frontend import NAME, TIMEOUT_SECONDS, Echo, Frontend, running_frontend, write_model
from openai import AuthenticationError, OpenAI
from secret_volume import SecretVolume

from skiff_runtime.api.http.auth import AccessPolicy
from skiff_runtime.config import Config
from skiff_runtime.config.api_keys import MAX_FILE_BYTES, read_api_keys
from skiff_runtime.errors import ConfigError
from skiff_runtime.processes.resolve import resolve

CHAT = "/v1/chat/completions"
KEYS = ("sk-first-key", "sk-second-key")
ORIGIN = "https://chat.example.org"
PROBES = ("/livez", "/readyz", "/startupz", "/health_generate", "/health", "/ping", "/metrics")


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> SecretVolume:
    """A mounted Secret with the second of the keys."""
    volume = SecretVolume(tmp_path_factory.mktemp("secret"))
    volume.write(keys=f"team-a: {KEYS[1]}\n")
    return volume


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory, secret: SecretVolume) -> Iterator[Frontend]:
    model = write_model(tmp_path_factory.mktemp("model"))
    file = str(secret.path("keys"))
    with running_frontend(model, api_key=KEYS[:1], api_key_file=file, allowed_origins=(ORIGIN,)) as front:
        echo = Echo(front.rank)
        echo.start()
        yield front
        echo.stop()


def client(front: Frontend, key: str) -> OpenAI:
    return OpenAI(base_url=front.url + "/v1", api_key=key, timeout=TIMEOUT_SECONDS, max_retries=0)


def send(front: Frontend, method: str, path: str, **headers: str) -> httpx.Response:
    return front.http.request(
        method, front.url + path, headers={name.replace("_", "-"): text for name, text in headers.items()}
    )


@pytest.mark.parametrize("key", KEYS)
def test_each_key_authenticates(front: Frontend, key: str) -> None:
    assert [model.id for model in client(front, key).models.list()] == [NAME]
    reply = client(front, key).chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": "x"}]
    )
    assert reply.choices[0].message.content


def test_wrong_key_gets_401(front: Frontend) -> None:
    with pytest.raises(AuthenticationError) as caught:
        client(front, "sk-wrong").models.list()
    assert caught.value.code == "invalid_api_key"
    assert caught.value.response.headers["www-authenticate"] == "Bearer"
    assert front.metric('skiff_rejected_requests_total{reason="unauthorized"}') >= 1


@pytest.mark.parametrize("header", ["", "Basic abc", "Bearer", "Bearer  ,", KEYS[0], f"Bearer {KEYS[0]} x"])
@pytest.mark.parametrize("path", [CHAT, "/generate", "/server_info", "/v1/models", "/nothing/here"])
def test_request_without_valid_key_gets_401(front: Frontend, path: str, header: str) -> None:
    method = "GET" if path in ("/server_info", "/v1/models") else "POST"
    response = send(front, method, path, authorization=header)
    assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
    assert response.headers["x-request-id"]


@pytest.mark.parametrize("path", PROBES)
def test_probes_need_no_key(front: Frontend, path: str) -> None:
    assert front.get(path).status_code == 200


def test_keys_never_appear_in_server_info_or_repr(front: Frontend) -> None:
    info = send(front, "GET", "/server_info", authorization=f"Bearer {KEYS[0]}").text
    assert '"allowed_origins"' in info and "sk-" not in info and "api_key_file" in info
    assert "sk-" not in repr(Config(api_key=KEYS))
    [launch] = Path(front.endpoints.api.removeprefix("ipc://")).parent.glob("launch.json")
    assert launch.stat().st_mode & 0o777 == 0o600 and KEYS[1] not in launch.read_text()


def test_every_response_has_request_id(front: Frontend) -> None:
    key = f"Bearer {KEYS[0]}"
    for method, path in [("GET", path) for path in (*PROBES, "/nope", "/v1/models")] + [
        ("POST", CHAT),
        ("PUT", CHAT),
    ]:
        given = send(front, method, path, x_request_id="trace.7", authorization=key)
        assert given.headers["x-request-id"] == "trace.7", (path, given.status_code)
        generated = send(front, method, path, x_request_id="not a word", authorization=key)
        assert re.fullmatch("[0-9a-f]{24}", generated.headers["x-request-id"])


def test_events_need_no_key(front: Frontend) -> None:
    with front.http.stream("GET", front.url + "/events") as response:
        assert response.status_code == 200


def test_openapi_document_declares_keys(front: Frontend) -> None:
    document = front.get("/openapi.json").json()
    assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    keyed = {
        path
        for path, methods in document["paths"].items()
        if all(each.get("security") and "401" in each["responses"] for each in methods.values())
    }
    assert set(document["paths"]) - keyed == {*PROBES, "/", "/events"}
    assert front.get("/docs").status_code == 200


def test_home_page_needs_no_key_and_runs_its_own_script_only(front: Frontend) -> None:
    response = front.get("/")
    page, policy = response.text, response.headers["content-security-policy"]
    assert (response.status_code, response.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert NAME not in page  # nothing about this service
    for name in ("script", "style"):
        [inline] = re.findall(rf"<{name}>(.*?)</{name}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}';" in policy
    assert policy.startswith("default-src 'none'; ") and "connect-src 'self';" in policy
    assert "frame-ancestors 'none'" in policy and response.headers["x-frame-options"] == "DENY"
    assert not re.search(r"(?:src|href)=\"?(?:https?:)?//|\son\w+=|\sstyle=|innerHTML", page)
    assert send(front, "POST", "/").status_code == 405


@pytest.mark.parametrize(
    "path", [*PROBES, "/", "/openapi.json", "/docs", "/v1/models", f"/v1/models/{NAME}", "/server_info"]
)
def test_head_is_get_without_body(front: Frontend, path: str) -> None:
    response = send(front, "HEAD", path, authorization=f"Bearer {KEYS[0]}", x_request_id="trace.8")
    assert (response.status_code, response.content) == (200, b"")
    assert int(response.headers["content-length"]) > 0
    assert response.headers.get_list("x-request-id") == ["trace.8"]


def test_allowed_origin_gets_cors_headers(front: Frontend) -> None:
    requested = {
        "access_control_request_method": "POST",
        "access_control_request_headers": "authorization,x-own",
    }
    preflight = send(front, "OPTIONS", CHAT, origin=ORIGIN, **requested)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == ORIGIN
    assert preflight.headers["access-control-allow-headers"] == "authorization,x-own"
    for status, response in (
        (401, send(front, "GET", "/v1/models", origin=ORIGIN)),
        (200, send(front, "GET", "/v1/models", origin=ORIGIN, authorization=f"Bearer {KEYS[1]}")),
    ):
        assert (response.status_code, response.headers["access-control-allow-origin"]) == (status, ORIGIN)


def test_other_origin_gets_no_cors_headers(front: Frontend) -> None:
    for method in ("OPTIONS", "GET"):
        response = send(
            front, method, "/v1/models", origin="https://evil.example", access_control_request_method="GET"
        )
        assert "access-control-allow-origin" not in response.headers
        assert response.headers["vary"] == "origin"


def test_without_allowed_origins_there_is_no_cors(tmp_path: Path) -> None:
    with running_frontend(write_model(tmp_path)) as front:
        response = send(front, "OPTIONS", CHAT, origin=ORIGIN, access_control_request_method="POST")
        assert response.status_code == 405
        assert not [name for name in response.headers if name.startswith("access-control")]
        assert send(front, "GET", "/v1/models", origin=ORIGIN).status_code == 200


@pytest.fixture(scope="module")
def keyless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    model = write_model(tmp_path_factory.mktemp("keyless"))
    with running_frontend(model, allowed_origins=(ORIGIN,), allowed_hosts=("skiff.example",)) as front:
        echo = Echo(front.rank)
        echo.start()
        yield front
        echo.stop()


def flush(front: Frontend, **headers: str) -> httpx.Response:
    """Send a POST request that a page may send without a preflight."""
    return send(front, "POST", "/flush_cache", content_type="text/plain", **headers)


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1", "http://127.0.0.1:1"])
def test_without_keys_other_origin_may_only_read(keyless: Frontend, origin: str) -> None:
    before = keyless.metric('skiff_rejected_requests_total{reason="forbidden"}')
    for path in ("/flush_cache", "/abort", CHAT, "/generate", "/nothing/here"):
        response = send(keyless, "POST", path, origin=origin)
        assert (response.status_code, response.json()["error"]["code"]) == (403, "origin_not_allowed")
        assert origin in response.json()["error"]["message"] and response.headers["connection"] == "close"
    assert keyless.metric('skiff_rejected_requests_total{reason="forbidden"}') == before + 5
    assert send(keyless, "GET", "/v1/models", origin=origin).status_code == 200


def test_same_origin_and_allowed_origin_may_post(keyless: Frontend) -> None:
    assert flush(keyless).status_code == 200
    assert flush(keyless, origin=keyless.url).status_code == 200
    assert flush(keyless, origin=ORIGIN).headers["access-control-allow-origin"] == ORIGIN
    assert flush(keyless, origin="https://Skiff.example", host="skiff.example").status_code == 200
    assert flush(keyless, origin="https://Skiff.example", host="evil.example").status_code == 403


def test_key_allows_any_origin(front: Frontend) -> None:
    evil = "https://evil.example"
    assert flush(front, origin=evil).status_code == 401
    assert flush(front, origin=evil, authorization=f"Bearer {KEYS[0]}").status_code == 200


def test_keys_are_read_from_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nsk-a\n\n  team-b:  sk-b  \r\na:b\n")
    assert read_api_keys(str(file), "--api-key-file") == {"sk-a": "", "sk-b": "team-b", "a:b": ""}
    resolved, _ = resolve(Config(model="demo://", device="cpu", api_key=("sk-c",), api_key_file=str(file)))
    ring = AccessPolicy.from_config(resolved).keys
    assert all(ring.find(key) == hashlib.sha256(key).digest() for key in (b"sk-a", b"sk-b", b"sk-c"))
    assert not any(ring.find(key) for key in (b"sk-", b"", b"# ours"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"# none\n", "holds no key"),
        (b"two words\n", "key 1 must"),
        (b"name: two words\n", "key 1 must"),
        (b"\xff\n", "cannot be read"),
        (b"k" * (MAX_FILE_BYTES + 1), "more than"),
        (None, "cannot be read"),
    ],
)
def test_invalid_key_file_is_rejected(tmp_path: Path, text: bytes | None, message: str) -> None:
    file = tmp_path / "keys"
    if text is not None:
        file.write_bytes(text)
    with pytest.raises(ConfigError, match=message) as caught:
        resolve(Config(model="demo://", device="cpu", api_key_file=str(file)))
    assert "two words" not in str(caught.value)


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_keys_rotate_without_a_restart_or_a_failed_request(front: Frontend, secret: SecretVolume) -> None:
    """A client sends all the time, and takes the new key while both are accepted, as a rotation should go."""
    old, new = KEYS[1], "sk-new-key"
    current, ended, statuses = [old], threading.Event(), []

    def status(key: str) -> int:
        return send(front, "GET", "/v1/models", authorization=f"Bearer {key}").status_code

    def keep_sending() -> None:
        while not ended.is_set():
            statuses.append(status(current[0]))
            time.sleep(0.01)

    assert status(new) == 401
    sender = threading.Thread(target=keep_sending)
    sender.start()
    try:
        secret.write(keys=f"team-a: {old}\nteam-a-next: {new}\n")
        eventually(lambda: status(new) == 200)
        assert status(old) == 200
        current[0] = new
        sent = len(statuses)
        eventually(lambda: len(statuses) > sent + 1)  # the last request with the old key has ended
        secret.write(keys=f"{new}\n")
        eventually(lambda: status(old) == 401)
    finally:
        ended.set()
        sender.join()
        secret.write(keys=f"team-a: {old}\n")
        eventually(lambda: status(old) == 200)
    assert len(statuses) > 10 and set(statuses) == {200}
    assert status(KEYS[0]) == 200  # the key of the flag never changes


@pytest.mark.parametrize("text", ["", "two words\n", None])
def test_unusable_key_file_keeps_the_last_keys(
    front: Frontend, secret: SecretVolume, text: str | None
) -> None:
    current = 'skiff_api_keys_last_reload_successful{flag="--api-key-file"}'
    failures = 'skiff_api_key_reloads_total{flag="--api-key-file",outcome="failure"}'
    assert front.metric(current) == 1
    secret.write(**({} if text is None else {"keys": text}))
    eventually(lambda: front.metric(current) == 0)
    counted = front.metric(failures)
    for key, expected in ((KEYS[0], 200), (KEYS[1], 200), ("", 401)):
        response = send(front, "GET", "/v1/models", authorization=f"Bearer {key}" if key else "")
        assert response.status_code == expected
    secret.write(keys=f"team-a: {KEYS[1]}\n")
    eventually(lambda: front.metric(current) == 1)
    assert front.metric(failures) == counted
