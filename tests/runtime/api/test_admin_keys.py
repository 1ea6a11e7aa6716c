"""Admin keys, cache namespaces of keys and salts, permission for priorities, and the Host header check."""

import hashlib
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from frontend import NAME, Frontend, running_frontend, write_model

from skiff_runtime.api.http.allowed_hosts import host_name, is_loopback
from skiff_runtime.api.http.auth import AccessPolicy
from skiff_runtime.config import Config
from skiff_runtime.errors import ConfigError
from skiff_runtime.messages import AbortRequest, FinishReason, FlushCache, Flushed, GenerateRequest
from skiff_runtime.processes.resolve import resolve

MINE, THEIRS, ADMIN = "sk-mine", "sk-theirs", "sk-admin"
BODY: dict[str, Any] = {"model": NAME, "prompt": "boat"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def front(model: Path) -> Iterator[Frontend]:
    with running_frontend(model, api_key=(MINE, THEIRS), admin_api_key=(ADMIN,), isolate_keys=True) as front:
        yield front


@pytest.fixture(scope="module")
def exposed(model: Path) -> Iterator[Frontend]:
    """Run a server without keys that listens on all addresses."""
    with running_frontend(model, host="0.0.0.0") as front:
        yield front


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def test_a_key_is_known_by_its_digest_alone(tmp_path: Path) -> None:
    digest = hashlib.sha256(ADMIN.encode()).hexdigest()
    file = tmp_path / "keys"
    file.write_text(THEIRS)
    config = Config(
        model="demo://", host="0.0.0.0", admin_api_key_sha256=(digest,), admin_api_key_file=str(file)
    )
    policy = AccessPolicy.from_config(config)

    def admin(key: str) -> bool:
        headers = [(b"authorization", f"Bearer {key}".encode())]
        return policy.authorize(
            {"type": "http", "path": "/abort", "method": "POST", "headers": headers}
        ).admin

    assert admin(ADMIN)
    assert admin(THEIRS), "the file counts beside it"
    assert not admin(MINE)
    policy.admin_keys.replace([MINE])
    assert admin(ADMIN), "a changed file does not end it"
    assert admin(MINE)
    assert not admin(THEIRS)
    for wrong in (digest[:-1], digest.upper(), ADMIN):
        with pytest.raises(ConfigError, match="--admin-api-key-sha256: digest 1"):
            Config(model="demo://", admin_api_key_sha256=(wrong,))


def post(
    front: Frontend, path: str, key: str | None = None, *, id: str = "", **body: object
) -> httpx.Response:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return front.http.post(
        front.url + path, json=body, headers={**headers, **({"x-request-id": id} if id else {})}
    )


def running(
    front: Frontend, pool: ThreadPoolExecutor, key: str | None, id: str
) -> tuple[Future[httpx.Response], GenerateRequest]:
    reply = pool.submit(post, front, "/v1/completions", key, id=id, **BODY)
    request = front.rank.request()
    front.rank.start(request)
    return reply, request


def rejection(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


@pytest.mark.parametrize("key", [MINE, THEIRS])
@pytest.mark.parametrize(("path", "body"), [("/abort", {"all": True}), ("/flush_cache", {})])
def test_api_key_is_no_admin_key(front: Frontend, path: str, body: dict[str, Any], key: str) -> None:
    before = front.metric('skiff_rejected_requests_total{reason="forbidden"}')
    response = post(front, path, key, **body)
    assert rejection(response) == (403, "admin_key_required") and "--admin-api-key" in response.text
    assert front.metric('skiff_rejected_requests_total{reason="forbidden"}') == before + 1
    assert not front.rank.poll()


def test_api_key_aborts_only_its_own_requests(front: Frontend, pool: ThreadPoolExecutor) -> None:
    """Clients choose request IDs, so requests of two keys may have the same one."""
    mine, my_request = running(front, pool, MINE, "same")
    theirs, their_request = running(front, pool, THEIRS, "same")
    assert post(front, "/abort", MINE, request_id="same").json() == {"aborted": 1}
    aborted = front.rank.receive()
    assert isinstance(aborted, AbortRequest) and aborted.uid == my_request.uid
    front.rank.finish(my_request.uid)
    assert mine.result().json()["choices"][0]["finish_reason"] == "abort"
    assert post(front, "/abort", THEIRS, request_id="other").json() == {"aborted": 0}
    assert post(front, "/abort", ADMIN, request_id="same").json() == {"aborted": 1}
    front.rank.receive()
    front.rank.finish(their_request.uid)
    assert theirs.result().status_code == 200


def test_admin_key_acts_on_all_requests(front: Frontend, pool: ThreadPoolExecutor) -> None:
    replies = [running(front, pool, key, "x") for key in (MINE, THEIRS, ADMIN)]
    assert post(front, "/abort", ADMIN, all=True).json() == {"aborted": 3}
    for reply, request in replies:
        front.rank.receive()
        front.rank.finish(request.uid, FinishReason.ABORT)
        assert reply.result().status_code == 200
    flushing = pool.submit(post, front, "/flush_cache", ADMIN)
    flush = front.rank.receive()
    assert isinstance(flush, FlushCache)
    front.rank.step([], flushed=[Flushed(flush.uid, pages=2, running=0)])
    assert flushing.result().json() == {"pages": 2, "running": 0}


@pytest.mark.parametrize("key", [None, "sk-unknown", "sk-mine,sk-admin"])
@pytest.mark.parametrize("path", ["/abort", "/flush_cache", "/v1/completions"])
def test_unknown_key_gets_401(front: Frontend, path: str, key: str | None) -> None:
    assert rejection(post(front, path, key, all=True)) == (401, "invalid_api_key")


def test_without_keys_admin_operations_need_loopback(exposed: Frontend, pool: ThreadPoolExecutor) -> None:
    """Clients cannot be distinguished, so one that guesses an ID could abort another's request."""
    reply, request = running(exposed, pool, None, "guessable")
    for body in ({"all": True}, {"request_id": "guessable"}):
        assert rejection(post(exposed, "/abort", **body)) == (403, "admin_key_required")
    assert rejection(post(exposed, "/flush_cache", "sk-any")) == (403, "admin_key_required")
    assert not exposed.rank.poll()
    exposed.rank.generate(request.uid, "x", FinishReason.STOP)
    assert reply.result().json()["choices"][0]["finish_reason"] == "stop"


def cache_namespace(
    front: Frontend, pool: ThreadPoolExecutor, path: str, key: str | None, body: dict[str, Any]
) -> bytes:
    """Return the cache namespace of a request, as the scheduler receives it."""
    reply = pool.submit(post, front, path, key, **body)
    request = front.rank.request()
    front.rank.start(request)
    front.rank.generate(request.uid, "x", FinishReason.STOP)
    assert reply.result().status_code == 200, reply.result().text
    return request.cache_salt


BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": BODY,
    "/v1/chat/completions": {"model": NAME, "messages": [{"role": "user", "content": "boat"}]},
    "/generate": {"text": "boat"},
}


@pytest.mark.parametrize("path", BODIES)
def test_cache_salt_selects_namespace(exposed: Frontend, pool: ThreadPoolExecutor, path: str) -> None:
    plain, one, again, other = (
        cache_namespace(exposed, pool, path, None, {**BODIES[path], **extra})
        for extra in ({}, {"cache_salt": "one"}, {"cache_salt": "one"}, {"cache_salt": "other"})
    )
    assert plain == b"" and one == again and len({plain, one, other}) == 3


@pytest.mark.parametrize("salt", ["", 7, "x" * 257])
@pytest.mark.parametrize("path", BODIES)
def test_malformed_cache_salt_is_rejected(exposed: Frontend, path: str, salt: object) -> None:
    response = post(exposed, path, **{**BODIES[path], "cache_salt": salt})
    assert response.status_code == 400 and response.json()["error"]["param"] == "cache_salt"


@pytest.mark.parametrize("path", BODIES)
def test_isolated_keys_have_separate_namespaces(front: Frontend, pool: ThreadPoolExecutor, path: str) -> None:
    namespaces = [
        cache_namespace(front, pool, path, key, {**BODIES[path], **extra})
        for key in (MINE, THEIRS)
        for extra in ({}, {"cache_salt": "one"})
    ]
    assert len(set(namespaces)) == 4 and b"" not in namespaces
    assert namespaces[0] == cache_namespace(front, pool, path, MINE, BODIES[path])


@pytest.mark.parametrize("path", BODIES)
def test_higher_priority_needs_allow_priority_or_admin_key(
    front: Frontend, pool: ThreadPoolExecutor, path: str
) -> None:
    response = post(front, path, MINE, **{**BODIES[path], "priority": -1})
    assert (
        rejection(response) == (400, "priority_not_allowed")
        and response.json()["error"]["param"] == "priority"
    )
    assert cache_namespace(front, pool, path, MINE, {**BODIES[path], "priority": 0})
    assert cache_namespace(front, pool, path, MINE, {**BODIES[path], "priority": 5})
    assert cache_namespace(front, pool, path, ADMIN, {**BODIES[path], "priority": -5})


def test_allow_priority_permits_higher_priority(model: Path, pool: ThreadPoolExecutor) -> None:
    with running_frontend(model, allow_priority=True) as front:
        reply = pool.submit(post, front, "/v1/completions", **{**BODY, "priority": -3})
        request = front.rank.request()
        assert request.priority == -3
        front.rank.start(request)
        front.rank.generate(request.uid, "x", FinishReason.STOP)
        assert reply.result().status_code == 200


@pytest.fixture(scope="module")
def local(model: Path) -> Iterator[Frontend]:
    with running_frontend(model, allowed_hosts=("box.example",)) as front:
        yield front


@pytest.mark.parametrize(
    "path", ["/v1/models", "/metrics", "/server_info", "/livez", "/openapi.json", "/nothing"]
)
@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "10.0.0.1", "box.example.evil"]
)
def test_dns_rebinding_is_rejected(local: Frontend, path: str, host: str) -> None:
    """The page's origin agrees with the Host header, so no origin check would stop it."""
    headers = {"host": host, "origin": f"http://{host}"}
    for method in ("GET", "POST"):
        response = local.http.request(method, local.url + path, headers=headers)
        assert rejection(response) == (403, "host_not_allowed") and "--allowed-hosts" in response.text


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:9",
        "127.0.0.1",
        "127.8.9.1:8000",
        "[::1]:8000",
        "app.localhost",
        "box.example",
        "Box.Example.:80",
    ],
)
def test_loopback_and_allowed_hosts_are_accepted(local: Frontend, host: str) -> None:
    assert local.http.get(local.url + "/v1/models", headers={"host": host}).status_code == 200


def test_request_without_host_is_accepted(local: Frontend) -> None:
    address = httpx.URL(local.url)
    with socket.create_connection((address.host, address.port or 0), timeout=30) as connection:
        connection.sendall(b"GET /livez HTTP/1.0\r\n\r\n")
        assert connection.recv(64).startswith(b"HTTP/1.1 200")


def test_with_keys_any_host_is_accepted(front: Frontend) -> None:
    headers = {"host": "any.example", "authorization": f"Bearer {MINE}"}
    assert front.http.get(front.url + "/v1/models", headers=headers).status_code == 200


def test_beyond_loopback_any_host_is_accepted(exposed: Frontend) -> None:
    assert (
        exposed.http.get(exposed.url + "/v1/models", headers={"host": "llama.default.svc"}).status_code == 200
    )


@pytest.mark.parametrize(
    ("text", "name", "loopback"),
    [
        ("localhost:8000", "localhost", True),
        ("[::1]:80", "::1", True),
        ("127.1.2.3", "127.1.2.3", True),
        ("[2001:db8::1]:80", "2001:db8::1", False),
        ("Example.ORG.:1", "example.org", False),
        ("0.0.0.0", "0.0.0.0", False),
        ("localhost.evil", "localhost.evil", False),
    ],
)
def test_host_name_is_extracted_from_header(text: str, name: str, loopback: bool) -> None:
    assert (host_name(text), is_loopback(name)) == (name, loopback)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"isolate_keys": True}, "--isolate-keys needs API keys"),
        ({"allowed_hosts": ("http://x",)}, "--allowed-hosts must be"),
        ({"allowed_hosts": ("x:80",)}, "--allowed-hosts must be"),
        ({"admin_api_key": ("two words",)}, "--admin-api-key: key 1 must"),
    ],
)
def test_invalid_option_is_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        Config(**options)
    assert "two words" not in str(caught.value)


def test_admin_keys_are_read_from_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# root\nsk-root\n")
    resolved, _ = resolve(
        Config(model="demo://", device="cpu", admin_api_key=("sk-a",), admin_api_key_file=str(file))
    )
    ring = AccessPolicy.from_config(resolved).admin_keys
    assert ring.find(b"sk-a") and ring.find(b"sk-root") and "sk-" not in repr(resolved)
    file.write_text("")
    with pytest.raises(ConfigError, match=r"--admin-api-key-file .* holds no key"):
        resolve(Config(model="demo://", device="cpu", admin_api_key_file=str(file)))
