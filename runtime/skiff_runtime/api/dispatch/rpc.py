"""Questions to the other processes that are answered by one message: what tokens a text has, what text tokens have."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from skiff_runtime.api.dispatch.service_status import ServiceStatus
from skiff_runtime.errors import QueueFull, RequestError, Unavailable
from skiff_runtime.messages import (
    Decoded,
    DecodeRequest,
    Encoded,
    EncodeRequest,
    FlushCache,
    Flushed,
    RequestFailed,
)
from skiff_runtime.messages.transport import Sender

MAX_PENDING_CALLS: Final = 256
ANSWER_SECONDS: Final = 30.0
RETRY_SECONDS: Final = 1

Question = EncodeRequest | DecodeRequest | FlushCache
Answer = Encoded | Decoded | Flushed


class RpcFailed(RequestError):
    """Another process answered with an error."""

    def __init__(self, failure: RequestFailed) -> None:
        super().__init__(failure.message, param=failure.param, code=failure.code)
        self.status = failure.status
        self.kind = failure.kind


class RpcClient:
    """Bounded in number and time. Their uids are negative, so that no answer is taken for a request's."""

    def __init__(self, tokenizers: Sequence[Sender], status: ServiceStatus) -> None:
        self._tokenizers = tokenizers
        self._status = status
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._last_uid = 0

    async def ask(self, question: Callable[[int], Question]) -> Answer:
        """Send the question that ``question`` makes of a uid; its answer. Raises ``RequestError``."""
        self._status.check_accepts_requests()
        if len(self._waiting) >= MAX_PENDING_CALLS:
            raise QueueFull(
                f"{MAX_PENDING_CALLS} such requests wait already; retry shortly",
                retry_after_seconds=RETRY_SECONDS,
            )
        self._last_uid -= 1
        uid = self._last_uid
        self._tokenizers[-uid % len(self._tokenizers)].send(question(uid))
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[uid] = answer
        try:
            return await asyncio.wait_for(answer, ANSWER_SECONDS)
        except TimeoutError:
            raise Unavailable(f"there was no answer within {ANSWER_SECONDS:g} s; retry shortly") from None
        finally:
            del self._waiting[uid]

    def answer(self, answer: Answer) -> None:
        """An answer came; no-op where nobody waits for it any more."""
        waiting = self._waiting.get(answer.uid)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def fail(self, failure: RequestFailed) -> None:
        """A question cannot be answered."""
        waiting = self._waiting.get(failure.uid)
        if waiting is not None and not waiting.done():
            waiting.set_exception(RpcFailed(failure))

    def fail_all(self, error: RequestError) -> None:
        """The service ends."""
        for uid in list(self._waiting):
            self.fail(RequestFailed.of(uid, error))
