"""Failed downloads end in one error that names the remedy."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from fake_hub import FakeHub, running_hub
from fake_source import Fault
from huggingface_hub import constants, get_session

from skiff_runtime.errors import ConfigError, FetchError
from skiff_runtime.hub import hub_client as client
from skiff_runtime.hub.fetch import fetch
from skiff_runtime.hub.hub_reference import HubReference, parse_reference
from skiff_runtime.hub.model_cache import ModelCache
from skiff_runtime.hub.repository import RemoteFile

REFERENCE = parse_reference("hf://acme/tiny")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "ATTEMPTS", 3)
    monkeypatch.setattr(client, "BASE_WAIT_SECONDS", 0.01)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "hub" / "acme" / "tiny"
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"w" * 50_000)
    return path


@pytest.fixture
def hub(model: Path) -> Iterator[FakeHub]:
    with running_hub(model.parent.parent) as running:
        yield running


def failure(hub: FakeHub, cache: Path, reference: HubReference = REFERENCE) -> str:
    """Return the message of the ``FetchError``, and check that no incomplete snapshot can be served."""
    with pytest.raises(FetchError) as caught:
        fetch(reference, cache, endpoint=hub.url)
    assert ModelCache(cache, reference).find_verified() is None
    return str(caught.value)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_checksum_mismatch_names_the_file_and_removes_it(hub: FakeHub, tmp_path: Path, name: str) -> None:
    hub.faults[name] = [Fault(corrupt=True)] * 2
    message = failure(hub, tmp_path / "cache")
    assert name in message and "checksum" in message
    assert not list((tmp_path / "cache").rglob(f"snapshots/*/{name}"))
    wrong = [
        path for path in (tmp_path / "cache").rglob("blobs/*") if path.read_bytes()[:1] in (b"\x88", b"\x84")
    ]
    assert not wrong


def test_gated_model_needs_a_token(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_hub(model.parent.parent, token="right") as hub:
        assert "set HF_TOKEN" in failure(hub, tmp_path / "cache")
        monkeypatch.setenv("HF_TOKEN", "wrong-token")
        message = failure(hub, tmp_path / "cache")
    assert "the token in HF_TOKEN has no access" in message and "wrong-token" not in message


def test_unknown_model_or_revision_is_named(hub: FakeHub, tmp_path: Path) -> None:
    message = failure(hub, tmp_path / "cache", HubReference("acme", "absent"))
    assert "acme/absent" in message and "404" in message
    message = failure(hub, tmp_path / "cache", HubReference("acme", "tiny", "v9"))
    assert "no revision 'v9'" in message


def test_unavailable_hub_is_tried_a_bounded_number_of_times(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults["listing"] = [Fault(status=503)] * 3
    assert "gave up after 3 attempts" in failure(hub, tmp_path / "cache")
    assert len(hub.seen) == 3


@pytest.mark.parametrize("fault", [Fault(cut_after_bytes=0), Fault(status=500)])
def test_undeliverable_file_is_tried_a_bounded_number_of_times(
    hub: FakeHub, tmp_path: Path, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # the library's own waits
    hub.faults["model.safetensors"] = [fault] * 99
    message = failure(hub, tmp_path / "cache")
    assert "model.safetensors" in message and "gave up after 3" in message
    assert len(hub.deliveries("model.safetensors")) <= 3 * 6


@pytest.mark.parametrize("name", ["listing", "model.safetensors"])
def test_overlong_retry_after_fails_at_once(hub: FakeHub, tmp_path: Path, name: str) -> None:
    hub.faults[name] = [Fault(status=429, headers={"Retry-After": "3600"})]
    assert "asks to retry after 3600 s" in failure(hub, tmp_path / "cache")
    assert not get_session().event_hooks["response"]  # the library's shared session is restored


def test_downloads_at_once_share_the_limit_on_retry_after() -> None:
    first, second = client.HubClient(REFERENCE), client.HubClient(REFERENCE)
    with contextlib.ExitStack() as outer:
        outer.enter_context(first.bounded_retry_after())
        with second.bounded_retry_after():
            outer.close()
            assert len(get_session().event_hooks["response"]) == 1
    assert not get_session().event_hooks["response"]


def test_unreachable_hub_is_named_without_its_password(tmp_path: Path, model: Path) -> None:
    with running_hub(model.parent.parent) as hub:
        pass
    message = failure(hub, tmp_path / "cache")
    assert "no answer from 127.0.0.1" in message and "HF_ENDPOINT" in message
    with pytest.raises(FetchError) as caught:
        fetch(REFERENCE, tmp_path / "cache", endpoint=hub.url.replace("//", "//user:password@"))
    assert "password" not in str(caught.value)


def test_malformed_listing_is_reported(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults["listing"] = [Fault(body=b"<html>welcome</html>")]
    assert "malformed" in failure(hub, tmp_path / "cache")
    hub.faults["listing"] = [Fault(body=b'{"id": "acme/tiny", "sha": "main", "siblings": []}')]
    assert "has no commit" in failure(hub, tmp_path / "cache")


def test_full_volume_error_has_both_sizes(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path, REFERENCE)
    cache.prepare()
    with pytest.raises(
        FetchError, match=r"not enough space in .*1000000\.07 GB are needed, [0-9.]+ GB are free"
    ):
        cache.check_space([RemoteFile("model.safetensors", 10**15, "")])


def test_unusable_cache_directory_is_named(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, not a directory")
    with pytest.raises(FetchError, match="--download-dir"):
        fetch(REFERENCE, tmp_path / "cache", endpoint=hub.url)


@pytest.mark.parametrize(
    ("removed", "added", "expected"),
    [
        ("config.json", {}, "no config.json"),
        ("model.safetensors", {"pytorch_model.bin": "x"}, "no *.safetensors"),
        ("none", {"model.safetensors.index.json": "{not json"}, "index.json is malformed"),
        (
            "none",
            {"model.safetensors.index.json": '{"weight_map": {"a": "../../etc/passwd"}}'},
            "'../../etc/passwd', which the repository does not have",
        ),
    ],
)
def test_repository_that_cannot_be_served_is_refused(
    hub: FakeHub, model: Path, tmp_path: Path, removed: str, added: Mapping[str, str], expected: str
) -> None:
    (model / removed).unlink(missing_ok=True)
    for name, text in added.items():
        (model / name).write_text(text)
    assert expected in failure(hub, tmp_path / "cache")


@pytest.mark.parametrize(
    "uri",
    ["hf://", "hf://org", "hf://org/name/more", "hf://../name", "hf://a--b/c", "org/name", "hf://o/n?x=1"],
)
def test_malformed_references_are_refused(uri: str) -> None:
    with pytest.raises(ConfigError, match="hf://org/name"):
        parse_reference(uri)


@pytest.mark.parametrize("revision", ["", "../x", "a b", "-x", "x" * 300])
def test_malformed_revisions_are_refused(revision: str) -> None:
    with pytest.raises(ConfigError, match="--revision"):
        parse_reference("hf://org/name", revision)


@pytest.mark.parametrize("endpoint", ["hub.internal", "ftp://hub", "https://", "http://["])
def test_malformed_endpoint_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    with pytest.raises(FetchError, match="HF_ENDPOINT must be"):
        fetch(REFERENCE, tmp_path)


def test_malformed_token_is_reported_but_not_shown(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abc def")
    message = failure(hub, tmp_path / "cache")
    assert "HF_TOKEN" in message and "hf_abc" not in message
