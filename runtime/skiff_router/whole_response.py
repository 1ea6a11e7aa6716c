"""One request with a small response, which is collected whole: for the API server and for what pods say about themselves."""

import asyncio

from skiff_router.upstream import ConnectionPool, Failure, Headers, UpstreamConnection, UpstreamError


class _Collector:
    """The receiver of a response of at most ``limit`` bytes."""

    def __init__(self, connection: UpstreamConnection, limit: int) -> None:
        self.outcome: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self._connection = connection
        self._limit = limit
        self._status = 0
        self._body = b""

    def on_head(self, status: int, headers: Headers) -> None:
        self._status = status

    def on_data(self, data: bytes) -> None:
        self._body += data
        if len(self._body) > self._limit:
            self._connection.abort(self)
            message = f"a response of more than {self._limit} bytes"
            self.on_failure(UpstreamError(Failure.MALFORMED, message))

    def on_end(self) -> None:
        if not self.outcome.done():
            self.outcome.set_result((self._status, self._body))

    def on_failure(self, error: UpstreamError) -> None:
        if not self.outcome.done():
            self.outcome.set_exception(error)


async def fetch(pool: ConnectionPool, request: bytes, *, seconds: float, limit: int) -> tuple[int, bytes]:
    """Send a request; return the status and the body of its response.

    Raises:
        UpstreamError: The connection failed, or the response is too long.
        TimeoutError: It did not come within ``seconds``.
    """
    async with asyncio.timeout(seconds):
        idle = pool.take_idle()
        if idle is not None:
            try:
                return await _exchange(idle, request, limit)
            except UpstreamError as error:
                if not error.reused:
                    raise
                # The other side closed the idle connection at the moment at which it was reused.
        return await _exchange(await pool.connect(), request, limit)


async def _exchange(connection: UpstreamConnection, request: bytes, limit: int) -> tuple[int, bytes]:
    collector = _Collector(connection, limit)
    connection.send((request,), collector)
    try:
        return await collector.outcome
    except asyncio.CancelledError:
        connection.abort(collector)
        raise
