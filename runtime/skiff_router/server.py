"""The router's process: listens, probes pods, serves, and drains after SIGTERM."""

import asyncio
import gc
import signal
from collections.abc import Callable, Coroutine
from typing import Any, Final
from uuid import uuid4

import uvloop

from skiff_router.app import RouterApp, proxied_routes
from skiff_router.config import (
    FLAG_BACKEND_API_KEY_FILE,
    FLAG_LIMITS_FILE,
    FLAG_USAGE_LOG,
    RouterConfig,
    read_single_key,
)
from skiff_router.discovery import KubernetesDiscovery
from skiff_router.endpoints import Registry
from skiff_router.event_watcher import EventWatcher
from skiff_router.key_usage import PATH as KEY_USAGE_PATH
from skiff_router.key_usage import KeyUsageApp
from skiff_router.kubernetes_watch import ClusterAccess, in_cluster_access
from skiff_router.limits import Limits, RateLimiter, read_limits
from skiff_router.metering import Metering
from skiff_router.metrics import RouterMetrics
from skiff_router.peers import Peers
from skiff_router.policies import make_policy
from skiff_router.prober import Prober
from skiff_router.proxy import Exchanges, Proxy, ProxyContext, ProxySettings
from skiff_router.retries import RetryBudget
from skiff_router.scale_requests import ScaleRequester
from skiff_router.usage_log import UsageLog
from skiff_router.waiting_room import WaitingLimits, WaitingRoom
from skiff_runtime import log
from skiff_runtime.api.http.auth import PROBE_PATHS, AccessPolicy, Principal
from skiff_runtime.api.http.cors import CorsPolicy
from skiff_runtime.api.http.http_server import make_http_server
from skiff_runtime.api.http.key_file import KeyFile
from skiff_runtime.api.http.late_requests import wait_until_over
from skiff_runtime.api.http.listener import listen
from skiff_runtime.api.http.middleware import AccessMiddleware
from skiff_runtime.api.http.reloaded_file import ReloadedFile, ValueT
from skiff_runtime.api.http.request_body import MIN_VALUE_LIMIT, BodyReader
from skiff_runtime.config.api_keys import KeyRing
from skiff_runtime.contract import FLAG_API_KEY_FILE
from skiff_runtime.errors import ConfigError

CLOSE_SECONDS: Final = 2
COLLECTION_THRESHOLD: Final = 20_000
"""Objects beyond those freed, after which the youngest are searched for garbage. Requests leave hardly any cycles, and at the
default of 700 the search takes a twentieth of the CPU time."""


class RouterServer:
    """One router. ``port`` is None until it listens."""

    def __init__(self, config: RouterConfig, access: ClusterAccess | None = None) -> None:
        """``access``: to the API server; needed with ``config.kubernetes``."""
        self.port: int | None = None
        self._config = config
        self._draining = False
        self._error: BaseException | None = None
        self._registry = Registry()
        for model, addresses in config.backends.items():
            self._registry.put(model, model).update({address: str(address) for address in addresses})
        self._discovery = None
        if access is not None:
            self._discovery = KubernetesDiscovery(access, self._registry, config.namespaces)
        self._exchanges = exchanges = Exchanges()
        self._limits_file: ReloadedFile[Limits] | None = None
        if config.limits_file is not None:
            self._limits_file = ReloadedFile(config.limits_file, FLAG_LIMITS_FILE, read_limits)
        self._limiter = RateLimiter(Limits() if self._limits_file is None else self._limits_file.value)
        self._usage_log = None if config.usage_log is None else UsageLog(config.usage_log, FLAG_USAGE_LOG)
        self._metrics = RouterMetrics(
            self._registry,
            lambda: len(self._http.server_state.connections),
            in_flight_by_key=self._limiter.in_flight,
            peers=self._count_peers if config.peers else None,
            lost_usage_lines=lambda: 0 if self._usage_log is None else self._usage_log.lost,
        )
        limits = WaitingLimits(
            requests=config.max_waiting_requests,
            body_bytes=config.max_waiting_bytes,
            seconds=config.waiting_timeout_seconds,
        )
        self._requester = None if access is None else ScaleRequester(access)
        self._room = WaitingRoom(limits, self._metrics, self._requester)
        key_file = None
        if config.api_key_file is not None:
            key_file = KeyFile(config.api_key_file, FLAG_API_KEY_FILE, given=())
        self._key_file = key_file
        self._metering = Metering(
            limiter=self._limiter, metrics=self._metrics, keys=key_file, log=self._usage_log
        )
        self._limiter.set_names(self._metering.names())
        self._backend_key: ReloadedFile[str] | None = None
        if config.backend_api_key_file is not None:
            file = config.backend_api_key_file
            self._backend_key = ReloadedFile(file, FLAG_BACKEND_API_KEY_FILE, read_single_key)
        router_id = uuid4().hex
        self._key_usage = KeyUsageApp(self._limiter, router_id)
        self._peers: Peers | None = None
        if config.peers:
            self._peers = Peers(config.peers, self._limiter, router_id, self._metering.names)
        context = ProxyContext(
            router_id=router_id,
            registry=self._registry,
            policy=make_policy(config.policy),
            exchanges=exchanges,
            metrics=self._metrics,
            metering=self._metering,
            room=self._room,
            settings=ProxySettings(
                first_byte_seconds=config.first_byte_timeout_seconds,
                forward_credentials=key_file is None,
                get_backend_key=self._get_backend_key,
            ),
            budget=RetryBudget(),
        )
        self._prober = Prober(self._registry, exchanges, self._get_backend_key)
        self._watcher = EventWatcher(self._registry, router_id, self._get_backend_key)
        app = AccessMiddleware(
            RouterApp(self._registry, self._metrics, is_ready=self._is_ready),
            posts=proxied_routes(
                Proxy(context, BodyReader(config.max_request_bytes, max_values=MIN_VALUE_LIMIT))
            ),
            gets={KEY_USAGE_PATH: self._key_usage} if config.peers else {},
            access=AccessPolicy(
                keys=KeyRing(()) if key_file is None else key_file.ring,
                admin_keys=KeyRing(()),
                cors=CorsPolicy(()),
                hosts=None,
                keyless=Principal(),
                probe_paths=PROBE_PATHS | {KEY_USAGE_PATH},
            ),
            on_rejected=self._metrics.record_rejection,
        )
        self._http = make_http_server(
            app, max_connections=config.max_connections, close_seconds=CLOSE_SECONDS
        )

    async def serve(self) -> None:
        """Serve until SIGTERM or SIGINT, and until the requests that run then have ended.

        Raises an error of a task in the background, after which the router would act on what it knew before.
        """
        listener = listen(self._config.host, self._config.port)
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(self._prober.run()), loop.create_task(self._watcher.run())]
        if self._discovery is not None:
            tasks.append(loop.create_task(self._discovery.run()))
        if self._peers is not None:
            tasks.append(loop.create_task(self._peers.run()))
        if self._key_file is not None:
            tasks.append(loop.create_task(self._key_file.watch(self._take_keys)))
        if self._limits_file is not None:
            self._warn_of_unknown_names()
            watch = self._watch(self._limits_file, self._take_limits, failure="limits_not_reloaded")
            tasks.append(loop.create_task(watch))
        if self._backend_key is not None:
            watch = self._watch(self._backend_key, self._take_backend_key, failure="backend_key_not_reloaded")
            tasks.append(loop.create_task(watch))
        for task in tasks:
            task.add_done_callback(self._end_if_failed)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.drain)
        self.port = listener.getsockname()[1]
        log.event("router_listening", host=self._config.host, port=self.port)
        try:
            await self._http.serve(sockets=[listener])
        finally:
            for task in tasks:
                task.cancel()
            if self._usage_log is not None:
                await asyncio.to_thread(self._usage_log.close)
            if self._requester is not None:
                self._requester.close()
        log.event("router_stopped")
        if self._error is not None:
            raise self._error

    def _end_if_failed(self, task: asyncio.Task[None]) -> None:
        """Stop if a task in the background has failed."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._error = error
            self.stop()

    def _watch(
        self, file: ReloadedFile[ValueT], take: Callable[[ValueT], None], *, failure: str
    ) -> Coroutine[Any, Any, None]:
        """Return the task that reads a file again whenever it changes, and records whether its content is in force.

        ``take`` gets the value before. A content that cannot be used is logged as ``failure``; the last value stays in force.
        """

        def change(before: ValueT) -> None:
            take(before)
            self._metrics.record_reload(file.flag, success=True)

        def keep(error: ConfigError) -> None:
            log.error(failure, reason=error)
            self._metrics.record_reload(file.flag, success=False)

        self._metrics.record_reload(file.flag, success=True)
        return file.watch(on_change=change, on_failure=keep)

    def _take_keys(self, success: bool) -> None:
        """Record a reload of the keys, and count for those that there are now."""
        self._metrics.record_reload(FLAG_API_KEY_FILE, success=success)
        self._limiter.set_names(self._metering.names())

    def _take_limits(self, _before: Limits) -> None:
        """Apply changed limits."""
        assert self._limits_file is not None
        self._limiter.replace(self._limits_file.value)
        log.event("limits_reloaded", file=self._limits_file.path, keys=len(self._limits_file.value.keys))
        self._warn_of_unknown_names()

    def _get_backend_key(self) -> str:
        """Return the API key for pods, empty for none."""
        return "" if self._backend_key is None else self._backend_key.value

    def _take_backend_key(self, _before: str) -> None:
        """Report another key for pods, which the next request sends."""
        log.event("backend_key_reloaded")

    def _count_peers(self) -> int:
        return 0 if self._peers is None else self._peers.connected

    def _warn_of_unknown_names(self) -> None:
        """Report limits for names that no key has: they may be misspelled, and then the default applies."""
        assert self._limits_file is not None
        unknown = sorted(self._limits_file.value.keys.keys() - self._metering.names())
        if unknown:
            log.warning("limits_without_a_key", names=", ".join(unknown))

    def _is_ready(self) -> bool:
        """Return whether requests are accepted: every model is known, and the router does not shut down."""
        return not self._draining and (self._discovery is None or self._discovery.is_synced)

    def stop(self) -> None:
        """Stop at once, without a drain."""
        self._key_usage.close()
        self._http.should_exit = True

    def drain(self) -> None:
        """Begin to drain, as SIGTERM does; end at once if that has begun already."""
        if self._draining:
            self.stop()  # a second signal does not wait
            return
        self._draining = True
        self._drain_task = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        """End the connections behind their responses, and exit when no request is in flight or the time is over."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        log.event("drain_started", in_flight=self._exchanges.requests)
        already, limit = self._exchanges.begun, self._config.drain_timeout_seconds
        self._room.close()
        self._http.begin_closing()
        await wait_until_over(lambda: self._exchanges.begun - already, timeout_seconds=limit)
        self._http.close_idle_connections()
        await self._exchanges.wait_until_idle(max(0.0, began + limit - loop.time()))
        if self._exchanges.requests:
            log.warning("drain_timed_out", aborted=self._exchanges.requests)
        self.stop()


def run(config: RouterConfig) -> None:
    """Run a router."""
    log.configure("router", config.log_level, batched=True)
    access = in_cluster_access() if config.kubernetes else None
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        server = RouterServer(config, access)
        gc.freeze()  # modules stay: collections need not look at them
        gc.set_threshold(COLLECTION_THRESHOLD)
        runner.run(server.serve())
