"""The value of ``--kv-events-config``: vLLM's JSON object of the same name."""

import re
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Struct

from skiff_runtime.errors import ConfigError

_ENDPOINT: Final = re.compile(r"tcp://(\*|\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+|::):[0-9]{1,5}|ipc:///.+")
Count = Annotated[int, Meta(ge=1, le=1 << 24)]


class KVEventsConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Keys and defaults are vLLM's.

    ``publisher``: by default "zmq" with ``enable_kv_cache_events``. ``endpoint``: of the PUB socket, which listens if
    the address contains ``*`` or ``::`` or is ``ipc://``, and connects to a subscriber that listens otherwise.
    ``replay_endpoint``: of the ROUTER socket, which listens; None for no replay. ``buffer_steps``: number of batches
    that are kept for replay. ``hwm``: number of batches that are kept for a slow subscriber, which loses further ones.
    ``max_queue_size``: number of batches that may wait to be published; none does, as sending never waits.
    """

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: Count = 10_000
    hwm: Count = 100_000
    max_queue_size: Count = 100_000
    topic: str = ""

    @property
    def is_enabled(self) -> bool:
        """Return whether events are published."""
        return self.enable_kv_cache_events and self.publisher != "null"

    @property
    def listens(self) -> bool:
        """Return whether the PUB socket listens at ``endpoint``."""
        return "*" in self.endpoint or "::" in self.endpoint or self.endpoint.startswith("ipc://")

    @staticmethod
    def parse(text: str) -> "KVEventsConfig":
        """Parse the flag's value.

        Raises:
            ConfigError: It is no JSON object, or a key is unknown or has an unusable value; the message names the key.
        """
        try:
            config = msgspec.json.decode(text, type=KVEventsConfig)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"--kv-events-config: {str(error).replace('$.', '')}") from None
        for key in ("endpoint", "replay_endpoint"):
            address = getattr(config, key)
            if address is not None and not _ENDPOINT.fullmatch(address):
                raise ConfigError(
                    f"--kv-events-config: {key} must be tcp://*:port, tcp://host:port or ipc:///path, not {address!r}"
                )
        return config
