"""Namespaces of the prefix cache: their salts can be taken apart again, and no two share one."""

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from skiff_runtime.kvcache.namespace import CacheNamespace

client_salts = st.just(b"") | st.binary(max_size=8).map(lambda salt: hashlib.sha256(salt).digest())
namespaces = client_salts.map(CacheNamespace) | st.builds(
    CacheNamespace,
    client_salts,
    st.integers(1, 1 << 40),
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=256),
)


@given(namespaces, namespaces)
def test_salt_names_one_namespace(one: CacheNamespace, other: CacheNamespace) -> None:
    assert CacheNamespace.decode(one.encode()) == one
    assert (one.encode() == other.encode()) == (one == other)
    prefix = CacheNamespace.adapter_prefix(other.adapter_id)
    if other.adapter_id:
        assert one.encode().startswith(prefix) == (one.adapter_id == other.adapter_id)


def test_names_of_blocks_depend_on_the_adapters_name_and_the_clients_salt_alone() -> None:
    salts = {
        CacheNamespace(client, number, name).hash_salt()
        for client in (b"", b"salt")
        for number, name in ((0, ""), (1, "sql"), (2, "sql"), (3, "chat"))
    }
    assert len(salts) == 6
