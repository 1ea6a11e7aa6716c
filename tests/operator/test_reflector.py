"""The internals of kopf that the reflector borrows: named here, and missed by name where a version lacks them."""

import pkgutil
from typing import Any

import msgspec
import pytest
from kopf._cogs.clients import api, watching
from kopf._core.reactor import queueing

from skiff_operator import reflector
from skiff_operator.errors import OperatorError


def test_this_version_of_kopf_has_all_that_is_borrowed() -> None:
    reflector.check()
    assert set(reflector.BORROWED) == {
        "kopf._cogs.clients.watching.infinite_watch",
        "kopf._cogs.clients.api.request",
        "kopf._cogs.clients.api.iter_jsonlines",
        "kopf._cogs.structs.references.Resource.get_url",
    }
    assert all(callable(pkgutil.resolve_name(name)) for name in reflector.BORROWED)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (watching, "infinite_watch"),
        (watching, "Bookmark"),
        (api, "request"),
        (api, "iter_jsonlines"),
    ],
)
def test_what_is_missing_is_named_with_the_version(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str
) -> None:
    monkeypatch.delattr(module, name)
    with pytest.raises(OperatorError, match=rf"kopf \d+\.\d+.* lacks .*{name}"):
        reflector.check()


def test_a_changed_signature_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async def request(url: str) -> None: ...

    monkeypatch.setattr(api, "request", request)
    with pytest.raises(OperatorError, match=r"api\.request"):
        reflector.check()


def test_a_watcher_that_would_not_call_the_replacement_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def watcher() -> None: ...

    monkeypatch.setattr(queueing, "watcher", watcher)
    with pytest.raises(OperatorError, match=r"queueing\.watcher"):
        reflector.check()


def test_an_object_is_decoded_without_its_managed_fields() -> None:
    text = (
        b'{"kind":"Pod","metadata":{"uid":"u","labels":{"a":"b"},"managedFields":[{}]},"spec":{"n":[1,null]}}'
    )
    encoded = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    metadata = {"uid": "u", "labels": {"a": "b"}}
    assert reflector.decode_object(encoded) == {"kind": "Pod", "metadata": metadata, "spec": {"n": [1, None]}}
