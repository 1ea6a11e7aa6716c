"""The other replicas of this router: how much of the limits of API keys their requests use.

Each router asks each of the others (``key_usage``). No store has to run beside the routers, and no client can report usage in
the name of a router. A peer that does not answer is asked again; meanwhile its requests in progress do
not count, and what they took meanwhile is counted when it answers again.
"""

import asyncio
import socket
from collections.abc import Callable, Collection, Sequence
from typing import Final

import msgspec

from skiff_router.key_usage import LONGEST_WAIT_SECONDS, PATH, REPORT_SECONDS, KeyUsageReport
from skiff_router.limits import RateLimiter
from skiff_router.upstream import Address, ConnectionPool, UpstreamError, format_get
from skiff_router.whole_response import fetch
from skiff_runtime import log

MAX_PEERS: Final = 64
RESOLVE_SECONDS: Final = 5.0
RETRY_SECONDS: Final = (0.2, 5.0)
"""The first delay before a peer is asked again, and the longest; each is twice the one before."""
MAX_REPORT_BYTES: Final = 1 << 20
_RESPONSE_SECONDS: Final = LONGEST_WAIT_SECONDS + 2.0


class _PeerFault(Exception):
    """A peer's response is not a usage report."""


class Peers:
    """Follows the use of limits at the other replicas. ``connected``: number of replicas that answer."""

    def __init__(
        self,
        hosts: Sequence[Address],
        limiter: RateLimiter,
        router_id: str,
        get_names: Callable[[], Collection[str]],
    ) -> None:
        """``hosts``: names or addresses of all replicas, this one too; a name may stand for many.

        ``get_names``: returns the names of the keys; what a peer reports of others is left out.
        """
        self._hosts = hosts
        self._limiter = limiter
        self._router_id = router_id
        self._get_names = get_names
        self._tasks: dict[Address, asyncio.Task[None]] = {}
        self._connected: dict[Address, str] = {}
        self._unresolved = ""

    @property
    def connected(self) -> int:
        """The number of other replicas that answer."""
        return len(set(self._connected.values()))

    async def run(self) -> None:
        """Follow the replicas for ever, those that come later too. Raises the error of a bug, after which one is not followed."""
        try:
            while True:
                for task in self._tasks.values():
                    if task.done():  # of this replica itself, or by a bug
                        task.result()
                addresses = await self._resolve()
                if addresses is not None:
                    self._update(addresses)
                await asyncio.sleep(RESOLVE_SECONDS)
        finally:
            self._update([])

    async def _resolve(self) -> list[Address] | None:
        """Return the addresses of all replicas, at most ``MAX_PEERS`` in order; None if a name cannot be resolved."""
        loop = asyncio.get_running_loop()
        found: dict[Address, None] = {}
        for host in self._hosts:
            try:
                infos = await loop.getaddrinfo(host.host, host.port, type=socket.SOCK_STREAM)
            except OSError as error:
                if not self._unresolved:
                    log.warning("peers_not_resolved", host=host.host, reason=error)
                self._unresolved = host.host
                return None
            found.update({Address(str(info[4][0]), host.port): None for info in infos})
        self._unresolved = ""
        if len(found) > MAX_PEERS:
            log.warning("too_many_peers", addresses=len(found), limit=MAX_PEERS)
        return sorted(found)[:MAX_PEERS]

    def _update(self, addresses: Sequence[Address]) -> None:
        for gone in [address for address in self._tasks if address not in addresses]:
            self._tasks.pop(gone).cancel()
        for address in addresses:
            if address not in self._tasks:
                self._tasks[address] = asyncio.get_running_loop().create_task(self._follow(address))

    async def _follow(self, address: Address) -> None:
        """Follow one replica until cancelled, or until it turns out to be this one."""
        pool = ConnectionPool(address)
        peer, version = "", -1
        first_delay, longest_delay = RETRY_SECONDS
        delay = first_delay
        try:
            while True:
                try:
                    report = await self._ask(pool, address, peer, version)
                except (UpstreamError, _PeerFault, TimeoutError) as error:
                    reason = str(error) or "no answer in time"
                    self._lose(address, reason)
                    version = -1  # its next report is to have all names
                    if delay < longest_delay <= 2 * delay:
                        log.warning("peer_unreachable", address=address, reason=reason)
                    await asyncio.sleep(delay)
                    delay = min(longest_delay, 2 * delay)
                    continue
                if report.router == self._router_id:
                    return
                if peer not in ("", report.router):
                    self._limiter.forget_peer(peer)  # another process has its address now
                peer, version, delay = report.router, report.version, first_delay
                if self._connected.get(address) != peer:
                    log.event("peer_found", address=address, peer=peer)
                    self._connected[address] = peer
                names = self._get_names()
                self._limiter.record_peer(
                    peer, {name: usage for name, usage in report.keys.items() if name in names}
                )
                await asyncio.sleep(REPORT_SECONDS)  # under load, each answer would have a change
        finally:
            self._connected.pop(address, None)
            self._limiter.forget_peer(peer)
            pool.close()

    def _lose(self, address: Address, reason: str) -> None:
        peer = self._connected.pop(address, None)
        if peer is not None:
            log.warning("peer_lost", address=address, peer=peer, reason=reason)
            if peer not in self._connected.values():  # by another address of it
                self._limiter.end_peer_requests(peer)

    async def _ask(self, pool: ConnectionPool, address: Address, peer: str, version: int) -> KeyUsageReport:
        """Return the next report of a peer.

        Raises:
            UpstreamError, TimeoutError: It cannot be reached, or does not answer. _PeerFault: It is no router.
        """
        target = f"{PATH}?router={peer}&version={version}"
        request = format_get(address, target)
        status, body = await fetch(pool, request, seconds=_RESPONSE_SECONDS, limit=MAX_REPORT_BYTES)
        if status != 200:
            raise _PeerFault(f"it answers with status {status}")
        try:
            return msgspec.json.decode(body, type=KeyUsageReport)
        except (msgspec.DecodeError, RecursionError) as error:
            raise _PeerFault(f"its report cannot be read: {error}") from None
