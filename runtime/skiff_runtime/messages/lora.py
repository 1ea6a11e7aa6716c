"""Messages about LoRA adapters: their load and unload, from the api to the ranks and back."""

from msgspec import Struct


class LoadAdapter(Struct, frozen=True, tag="load_adapter", array_like=True):
    """api -> tokenizer -> rank 0 -> other ranks: read the adapter in the directory ``path``.

    The reply is ``AdapterLoaded`` or ``AdapterRefused``. ``adapter_id``: at least 1, never used before. Equal names mean
    equal content only for equal ids.
    """

    uid: int
    adapter_id: int
    name: str
    path: str


class UnloadAdapter(Struct, frozen=True, tag="unload_adapter", array_like=True):
    """api -> tokenizer -> rank 0 -> other ranks: forget an adapter. None of its requests is in flight at the api."""

    adapter_id: int


class AdapterRead(Struct, frozen=True, tag="adapter_read", array_like=True):
    """rank 0 -> the schedulers of all ranks: rank 0 has an adapter in host memory now, or could not read it.

    ``error``: the reason for which it could not, "" if it could.
    """

    adapter_id: int
    error: str = ""


class AdapterLoaded(Struct, frozen=True, tag="adapter_loaded", array_like=True):
    """The reply to ``LoadAdapter``: requests may choose the adapter from now on."""

    uid: int
    adapter_id: int


class AdapterRefused(Struct, frozen=True, tag="adapter_refused", array_like=True):
    """The reply to ``LoadAdapter``: the adapter cannot be served, for ``reason``."""

    uid: int
    adapter_id: int
    reason: str
