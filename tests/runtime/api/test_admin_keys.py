"""Acts on the requests of others need an admin key, a place before them needs a flag, a foreign Host is refused."""

import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from frontend import NAME, Frontend, running_frontend, write_model

from skiff_runtime.api.http.allowed_hosts import host_name, is_loopback
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
    """Keyless, and not on loopback alone."""
    with running_frontend(model, host="0.0.0.0") as front:
        yield front


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


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
    front.rank.open(request)
    return reply, request


def refusal(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


@pytest.mark.parametrize("key", [MINE, THEIRS])
@pytest.mark.parametrize(("path", "body"), [("/abort", {"all": True}), ("/flush_cache", {})])
def test_an_api_key_acts_on_nobody_else(front: Frontend, path: str, body: dict[str, Any], key: str) -> None:
    before = front.metric('skiff_rejected_requests_total{reason="forbidden"}')
    refused = post(front, path, key, **body)
    assert refusal(refused) == (403, "admin_key_required") and "--admin-api-key" in refused.text
    assert front.metric('skiff_rejected_requests_total{reason="forbidden"}') == before + 1
    assert not front.rank.poll()


def test_a_key_ends_its_own_requests_only(front: Frontend, pool: ThreadPoolExecutor) -> None:
    """Whatever id they have in common: clients choose it."""
    mine, my_request = running(front, pool, MINE, "same")
    theirs, their_request = running(front, pool, THEIRS, "same")
    assert post(front, "/abort", MINE, request_id="same").json() == {"aborted": 1}
    aborted = front.rank.receive()
    assert isinstance(aborted, AbortRequest) and aborted.uid == my_request.uid
    front.rank.end(my_request.uid)
    assert mine.result().json()["choices"][0]["finish_reason"] == "abort"
    assert post(front, "/abort", THEIRS, request_id="other").json() == {"aborted": 0}
    assert post(front, "/abort", ADMIN, request_id="same").json() == {"aborted": 1}
    front.rank.receive()
    front.rank.end(their_request.uid)
    assert theirs.result().status_code == 200


def test_an_admin_key_acts_on_all(front: Frontend, pool: ThreadPoolExecutor) -> None:
    replies = [running(front, pool, key, "x") for key in (MINE, THEIRS, ADMIN)]
    assert post(front, "/abort", ADMIN, all=True).json() == {"aborted": 3}
    for reply, request in replies:
        front.rank.receive()
        front.rank.end(request.uid, FinishReason.ABORT)
        assert reply.result().status_code == 200
    flushing = pool.submit(post, front, "/flush_cache", ADMIN)
    flush = front.rank.receive()
    assert isinstance(flush, FlushCache)
    front.rank.step([], flushed=[Flushed(flush.uid, pages=2, running=0)])
    assert flushing.result().json() == {"pages": 2, "running": 0}


@pytest.mark.parametrize("key", [None, "sk-unknown", "sk-mine,sk-admin"])
@pytest.mark.parametrize("path", ["/abort", "/flush_cache", "/v1/completions"])
def test_an_unknown_key_is_no_key(front: Frontend, path: str, key: str | None) -> None:
    assert refusal(post(front, path, key, all=True)) == (401, "invalid_api_key")


def test_without_keys_nobody_is_admin_beyond_loopback(exposed: Frontend, pool: ThreadPoolExecutor) -> None:
    """Clients are all alike, so a client that guesses an id could end another's request."""
    reply, request = running(exposed, pool, None, "guessable")
    for body in ({"all": True}, {"request_id": "guessable"}):
        assert refusal(post(exposed, "/abort", **body)) == (403, "admin_key_required")
    assert refusal(post(exposed, "/flush_cache", "sk-any")) == (403, "admin_key_required")
    assert not exposed.rank.poll()
    exposed.rank.say(request.uid, "x", FinishReason.STOP)
    assert reply.result().json()["choices"][0]["finish_reason"] == "stop"


def salts(
    front: Frontend, pool: ThreadPoolExecutor, path: str, key: str | None, body: dict[str, Any]
) -> bytes:
    """Return the cache namespace of a request, as the scheduler receives it."""
    reply = pool.submit(post, front, path, key, **body)
    request = front.rank.request()
    front.rank.open(request)
    front.rank.say(request.uid, "x", FinishReason.STOP)
    assert reply.result().status_code == 200, reply.result().text
    return request.cache_salt


BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": BODY,
    "/v1/chat/completions": {"model": NAME, "messages": [{"role": "user", "content": "boat"}]},
    "/generate": {"text": "boat"},
}


@pytest.mark.parametrize("path", BODIES)
def test_a_salt_is_a_namespace_of_its_own(exposed: Frontend, pool: ThreadPoolExecutor, path: str) -> None:
    plain, one, again, other = (
        salts(exposed, pool, path, None, {**BODIES[path], **extra})
        for extra in ({}, {"cache_salt": "one"}, {"cache_salt": "one"}, {"cache_salt": "other"})
    )
    assert plain == b"" and one == again and len({plain, one, other}) == 3


@pytest.mark.parametrize("salt", ["", 7, "x" * 257])
@pytest.mark.parametrize("path", BODIES)
def test_a_malformed_salt_is_refused(exposed: Frontend, path: str, salt: object) -> None:
    refused = post(exposed, path, **{**BODIES[path], "cache_salt": salt})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "cache_salt"


@pytest.mark.parametrize("path", BODIES)
def test_isolated_keys_share_no_prefix(front: Frontend, pool: ThreadPoolExecutor, path: str) -> None:
    found = [
        salts(front, pool, path, key, {**BODIES[path], **extra})
        for key in (MINE, THEIRS)
        for extra in ({}, {"cache_salt": "one"})
    ]
    assert len(set(found)) == 4 and b"" not in found
    assert found[0] == salts(front, pool, path, MINE, BODIES[path])


@pytest.mark.parametrize("path", BODIES)
def test_a_place_before_others_needs_the_flag(front: Frontend, pool: ThreadPoolExecutor, path: str) -> None:
    refused = post(front, path, MINE, **{**BODIES[path], "priority": -1})
    assert (
        refusal(refused) == (400, "priority_not_allowed") and refused.json()["error"]["param"] == "priority"
    )
    assert salts(front, pool, path, MINE, {**BODIES[path], "priority": 0})
    assert salts(front, pool, path, MINE, {**BODIES[path], "priority": 5})
    assert salts(front, pool, path, ADMIN, {**BODIES[path], "priority": -5})


def test_the_flag_lets_all_run_before_others(model: Path, pool: ThreadPoolExecutor) -> None:
    with running_frontend(model, allow_priority=True) as front:
        reply = pool.submit(post, front, "/v1/completions", **{**BODY, "priority": -3})
        request = front.rank.request()
        assert request.priority == -3
        front.rank.open(request)
        front.rank.say(request.uid, "x", FinishReason.STOP)
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
def test_a_page_that_gave_loopback_its_own_name_reads_nothing(local: Frontend, path: str, host: str) -> None:
    """DNS rebinding: the page's origin and the Host header agree, so that no check of origins would stop it."""
    headers = {"host": host, "origin": f"http://{host}"}
    for method in ("GET", "POST"):
        refused = local.http.request(method, local.url + path, headers=headers)
        assert refusal(refused) == (403, "host_not_allowed") and "--allowed-hosts" in refused.text


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
def test_names_of_this_machine_are_its_own(local: Frontend, host: str) -> None:
    assert local.http.get(local.url + "/v1/models", headers={"host": host}).status_code == 200


def test_a_request_without_a_host_comes_from_no_browser(local: Frontend) -> None:
    address = httpx.URL(local.url)
    with socket.create_connection((address.host, address.port or 0), timeout=30) as connection:
        connection.sendall(b"GET /livez HTTP/1.0\r\n\r\n")
        assert connection.recv(64).startswith(b"HTTP/1.1 200")


def test_a_key_is_what_no_page_has(front: Frontend) -> None:
    headers = {"host": "any.example", "authorization": f"Bearer {MINE}"}
    assert front.http.get(front.url + "/v1/models", headers=headers).status_code == 200


def test_where_others_can_connect_any_name_will_do(exposed: Frontend) -> None:
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
def test_names_in_a_host_header(text: str, name: str, loopback: bool) -> None:
    assert (host_name(text), is_loopback(name)) == (name, loopback)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"isolate_keys": True}, "--isolate-keys needs keys"),
        ({"allowed_hosts": ("http://x",)}, "--allowed-hosts must be"),
        ({"allowed_hosts": ("x:80",)}, "--allowed-hosts must be"),
        ({"admin_api_key": ("two words",)}, "--admin-api-key: key 1 must"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        Config(**options)
    assert "two words" not in str(caught.value)


def test_admin_keys_come_from_a_file_too(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# root\nsk-root\n")
    resolved, _ = resolve(
        Config(model="demo://", device="cpu", admin_api_key=("sk-a",), admin_api_key_file=str(file))
    )
    assert resolved.admin_api_key == ("sk-a", "sk-root") and "sk-" not in repr(resolved)
    file.write_text("")
    with pytest.raises(ConfigError, match=r"--admin-api-key-file .* holds no key"):
        resolve(Config(model="demo://", device="cpu", admin_api_key_file=str(file)))
