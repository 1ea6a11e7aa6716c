"""Store of responses in memory, for ``previous_response_id``, references to items, and GET /v1/responses/{id}.

A stored response has a link to the response that it continues, so a conversation is stored once however long it is. An
earlier response that has left the store stays in memory while a later one continues it, and its bytes count until then.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from skiff_runtime.errors import InvalidRequest, ResponseNotFound

MAX_RESPONSES: Final = 4096
MAX_STORED_BYTES: Final = 64 << 20
MAX_AGE_SECONDS: Final = 24 * 3600.0
MAX_CONVERSATION_BYTES: Final = 8 << 20
"""A longer conversation would take the api process too long to decode for one request."""


@dataclass(slots=True, eq=False)
class StoredResponse:
    """A response and the input that it answers, as JSON.

    ``key``: digest of the API key of its request. ``body`` is what GET returns. ``output_items`` are its items by id,
    without log-probabilities, for conversations and references. ``references`` counts the store, while it has the
    response, and every response that continues it.
    """

    id: str
    key: bytes
    body: bytes
    input_items: bytes
    parent: "StoredResponse | None"
    output_items: Mapping[str, bytes]
    stored_at: float = 0.0
    references: int = field(default=0, repr=False)

    @property
    def conversation_size(self) -> int:
        """Return the number of bytes that the response adds to a conversation."""
        return len(self.input_items) + sum(map(len, self.output_items.values()))

    @property
    def size(self) -> int:
        """Return the number of bytes that the response takes."""
        return len(self.body) + self.conversation_size

    def load_input(self) -> list[dict[str, Any]]:
        """Return the items of the request's own input."""
        items: list[dict[str, Any]] = msgspec.json.decode(self.input_items)
        return items

    def load_output(self) -> list[dict[str, Any]]:
        """Return the items of the response."""
        return [msgspec.json.decode(item) for item in self.output_items.values()]

    def load_conversation(self) -> list[dict[str, Any]]:
        """Return all items up to the end of this response. Raises ``InvalidRequest`` if they are too many."""
        chain: list[StoredResponse] = []
        node: StoredResponse | None = self
        size = 0
        while node is not None:
            chain.append(node)
            size += node.conversation_size
            if size > MAX_CONVERSATION_BYTES:
                raise InvalidRequest(
                    f"the conversation has more than {MAX_CONVERSATION_BYTES} bytes; begin a new one with a shorter input",
                    param="previous_response_id",
                )
            node = node.parent
        return [item for each in reversed(chain) for item in (*each.load_input(), *each.load_output())]


class _Share:
    """The responses of one API key, the oldest first, and the bytes that they keep in memory."""

    __slots__ = ("num_bytes", "responses")

    def __init__(self) -> None:
        self.responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self.num_bytes = 0

    @property
    def oldest(self) -> StoredResponse:
        return next(iter(self.responses.values()))


class ResponseStore:
    """Responses of the last requests, limited in number, bytes and age.

    Beyond a limit, the API key that has the most gives up its oldest response, so that no key displaces those of others.
    A response is found with the API key of its own request only.
    """

    def __init__(
        self,
        *,
        max_responses: int = MAX_RESPONSES,
        max_bytes: int = MAX_STORED_BYTES,
        max_age_seconds: float = MAX_AGE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._max_age_seconds = max_age_seconds
        self._clock = clock
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._items: dict[str, StoredResponse] = {}
        self._shares: dict[bytes, _Share] = {}
        self.total_bytes = 0

    def __len__(self) -> int:
        return len(self._responses)

    def add(self, response: StoredResponse) -> None:
        """Store a response unless it is longer than any conversation, and remove old ones beyond the limits."""
        if response.size > MAX_CONVERSATION_BYTES:
            return
        response.stored_at = self._clock()
        share = self._shares.setdefault(response.key, _Share())
        share.responses[response.id] = response
        self._responses[response.id] = response
        self._items.update(dict.fromkeys(response.output_items, response))
        self._retain(response)
        self._expire()
        while len(self._responses) > self._max_responses:
            self._remove_from_largest(lambda share: len(share.responses))
        while self._responses and self.total_bytes > self._max_bytes:
            self._remove_from_largest(lambda share: share.num_bytes)

    def get(self, response_id: str, key: bytes, *, param: str | None = None) -> StoredResponse:
        """Return a response. Raises ``ResponseNotFound``; ``param``: the field of the request that has the id."""
        self._expire()
        response = self._responses.get(response_id)
        if response is None or response.key != key:
            raise ResponseNotFound(
                f"there is no response {response_id[:80]!r}: it was not stored, or left the store since "
                '("store": false, a restart, another replica, or the limits on age and size)',
                param=param,
            )
        return response

    def load_items(self, item_ids: Sequence[str], key: bytes) -> dict[str, dict[str, Any]]:
        """Return items of the output of stored responses, by id.

        Raises ``ResponseNotFound``, and ``InvalidRequest`` if an id is repeated or the items are too long.
        """
        self._expire()
        encoded: dict[str, bytes] = {}
        size = 0
        for item_id in item_ids:
            response = self._items.get(item_id)
            if response is None or response.key != key:
                raise ResponseNotFound(
                    f"there is no item {item_id[:80]!r} in a stored response; send the item itself",
                    param="input",
                )
            if item_id in encoded:
                raise InvalidRequest(f"the item {item_id!r} is referenced twice", param="input")
            encoded[item_id] = response.output_items[item_id]
            size += len(encoded[item_id])
            if size > MAX_CONVERSATION_BYTES:
                raise InvalidRequest(
                    f"the referenced items have more than {MAX_CONVERSATION_BYTES} bytes; reference fewer",
                    param="input",
                )
        return {item_id: msgspec.json.decode(item) for item_id, item in encoded.items()}

    def delete(self, response_id: str, key: bytes) -> None:
        """Remove a response. Raises ``ResponseNotFound``."""
        self._remove(self.get(response_id, key))

    def _expire(self) -> None:
        oldest = self._clock() - self._max_age_seconds
        while self._responses:
            response = next(iter(self._responses.values()))
            if response.stored_at >= oldest:
                return
            self._remove(response)

    def _remove_from_largest(self, size: Callable[[_Share], int]) -> None:
        """Remove the oldest response of the key with the largest share; of equal ones, that with the oldest response."""
        largest = max(self._shares.values(), key=lambda share: (size(share), -share.oldest.stored_at))
        self._remove(largest.oldest)

    def _remove(self, response: StoredResponse) -> None:
        del self._responses[response.id]
        share = self._shares[response.key]
        del share.responses[response.id]
        for item_id in response.output_items:
            del self._items[item_id]
        self._release(response)
        if not share.responses:
            del self._shares[response.key]

    def _retain(self, response: StoredResponse) -> None:
        """Add a reference; the first one counts the response, and refers to the one that it continues."""
        node: StoredResponse | None = response
        while node is not None:
            node.references += 1
            if node.references > 1:
                return
            self.total_bytes += node.size
            self._shares[node.key].num_bytes += node.size
            node = node.parent

    def _release(self, response: StoredResponse) -> None:
        """Remove a reference; the last one ends the count of the response."""
        node: StoredResponse | None = response
        while node is not None:
            node.references -= 1
            if node.references:
                return
            self.total_bytes -= node.size
            self._shares[node.key].num_bytes -= node.size
            node = node.parent
