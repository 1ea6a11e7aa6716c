"""HTTP endpoints of the operator: probes on one port, metrics on another."""

import contextlib
from collections.abc import AsyncIterator, Callable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from skiff_operator import metrics
from skiff_operator.settings import Settings
from skiff_runtime import contract


@contextlib.asynccontextmanager
async def serving(
    settings: Settings, *, unhealthy: Callable[[], str], unready: Callable[[], str]
) -> AsyncIterator[None]:
    """Serve inside the block. `unhealthy` and `unready` return the reason why their probe fails, or an empty string."""

    def verdict(reason: str) -> web.Response:
        return web.Response(text=reason or "ok", status=503 if reason else 200)

    async def live(_: web.Request) -> web.Response:
        return verdict(unhealthy())

    async def ready(_: web.Request) -> web.Response:
        return verdict(unhealthy() or unready())

    async def scrape(_: web.Request) -> web.Response:
        return web.Response(body=metrics.page(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    health, exposition = web.Application(), web.Application()
    health.add_routes([web.get("/healthz", live), web.get("/readyz", ready)])
    exposition.add_routes([web.get(contract.PATH_METRICS, scrape)])
    async with contextlib.AsyncExitStack() as stack:
        for app, port in ((health, settings.health_port), (exposition, settings.metrics_port)):
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, port=port).start()
        yield
