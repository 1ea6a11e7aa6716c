"""Remote procedure calls to other processes: tokenize, detokenize, flush the prefix cache, load an adapter.

Each is one message each way.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from skiff_runtime.api.dispatch.service_status import ServiceStatus
from skiff_runtime.errors import InvalidRequest, QueueFull, RequestError, Unavailable
from skiff_runtime.messages import (
    AdapterLoaded,
    AdapterRefused,
    Decoded,
    DecodeRequest,
    Encoded,
    EncodeRequest,
    FlushCache,
    Flushed,
    LoadAdapter,
    RequestFailed,
)
from skiff_runtime.messages.transport import MessageNotEncodable, Sender

MAX_PENDING_CALLS: Final = 256
CALL_TIMEOUT_SECONDS: Final = 30.0
RETRY_AFTER_SECONDS: Final = 1

RpcRequest = EncodeRequest | DecodeRequest | FlushCache | LoadAdapter
RpcResponse = Encoded | Decoded | Flushed | AdapterLoaded | AdapterRefused


class RpcFailed(RequestError):
    """Another process answered a call with an error."""

    def __init__(self, failure: RequestFailed) -> None:
        super().__init__(failure.message, param=failure.param, code=failure.code)
        self.status = failure.status
        self.kind = failure.kind


class RpcClient:
    """Pending calls, limited in number and time. Their uids are negative, unlike those of generation requests."""

    def __init__(self, tokenizers: Sequence[Sender], status: ServiceStatus) -> None:
        self._tokenizers = tokenizers
        self._status = status
        self._pending: dict[int, asyncio.Future[RpcResponse]] = {}
        self._last_uid = 0

    async def call(
        self, make_request: Callable[[int], RpcRequest], *, timeout_seconds: float = CALL_TIMEOUT_SECONDS
    ) -> RpcResponse:
        """Send the request that ``make_request`` returns for a uid, and return the response.

        Raises:
            Unavailable: The service does not accept requests, or did not respond in time.
            InvalidRequest: The request has a value that no message can carry.
            QueueFull: Too many calls are pending.
            RpcFailed: The response is an error.
        """
        self._status.check_accepts_requests()
        if len(self._pending) >= MAX_PENDING_CALLS:
            raise QueueFull(
                f"{MAX_PENDING_CALLS} requests of this kind are waiting already; retry shortly",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )
        self._last_uid -= 1
        uid = self._last_uid
        try:
            self._tokenizers[-uid % len(self._tokenizers)].send(make_request(uid))
        except MessageNotEncodable as error:
            raise InvalidRequest(f"the request cannot be processed: {error}") from None
        response: asyncio.Future[RpcResponse] = asyncio.get_running_loop().create_future()
        self._pending[uid] = response
        try:
            return await asyncio.wait_for(response, timeout_seconds)
        except TimeoutError:
            raise Unavailable(f"no response within {timeout_seconds:g} s; retry shortly") from None
        finally:
            del self._pending[uid]

    def resolve(self, response: RpcResponse) -> None:
        """Complete the call that ``response`` belongs to; no-op if it has timed out."""
        pending = self._pending.get(response.uid)
        if pending is not None and not pending.done():
            pending.set_result(response)

    def fail(self, failure: RequestFailed) -> None:
        """Fail the call that ``failure`` belongs to; no-op if it belongs to none."""
        pending = self._pending.get(failure.uid)
        if pending is not None and not pending.done():
            pending.set_exception(RpcFailed(failure))

    def fail_all(self, error: RequestError) -> None:
        """Fail every pending call with ``error``."""
        for uid in list(self._pending):
            self.fail(RequestFailed.of(uid, error))
