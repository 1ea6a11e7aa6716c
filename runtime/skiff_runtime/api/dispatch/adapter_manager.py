"""LoRA adapters as the api process knows them: their loads, their names, and their unloads."""

from collections.abc import Iterable, Sequence
from typing import Final

from skiff_runtime import log
from skiff_runtime.api.dispatch.daemon_thread import run_on_daemon_thread
from skiff_runtime.api.dispatch.dispatcher import Dispatcher
from skiff_runtime.api.dispatch.rpc import RpcClient
from skiff_runtime.api.formats.served_model import ServedModel
from skiff_runtime.config import Config
from skiff_runtime.config.adapters import check_new_adapter
from skiff_runtime.errors import (
    ConfigError,
    FetchError,
    InvalidRequest,
    ModelNotFound,
    QueueFull,
    Unavailable,
)
from skiff_runtime.messages import AdapterRefused, LoadAdapter, UnloadAdapter
from skiff_runtime.messages.transport import Sender
from skiff_runtime.processes.adapter_files import locate_adapter
from skiff_runtime.processes.launch import StartAdapter
from skiff_runtime.state_events import PodAdapters

MAX_CONCURRENT_LOADS: Final = 16
LOAD_TIMEOUT_SECONDS: Final = 300.0
"""Time that the ranks have to read an adapter. Its download has the limits of every download."""
RETRY_AFTER_SECONDS: Final = 5


class AdapterManager:
    """Gives adapters their ids, and enters them among those that requests may choose.

    An adapter that is unloaded cannot be chosen any more at once; the ranks forget it when its last request has ended.
    """

    def __init__(
        self,
        config: Config,
        model: ServedModel,
        adapters: Sequence[StartAdapter],
        *,
        rpc: RpcClient,
        dispatcher: Dispatcher,
        scheduler: Sender,
    ) -> None:
        """``adapters``: those of ``--lora``. ``scheduler``: a tokenizer, which passes messages on to rank 0."""
        self._config = config
        self._model = model
        self._rpc = rpc
        self._dispatcher = dispatcher
        self._scheduler = scheduler
        self._names: dict[int, str] = {}
        self._loading: set[str] = set()
        self._last_id = len(adapters)
        for each in adapters:
            self._enter(model.make_adapter(each.adapter_id, each.name, each.uri))
        dispatcher.on_adapter_idle = self._forget

    def __len__(self) -> int:
        return len(self._model.adapters)

    def find_name(self, adapter_id: int) -> str:
        """Return the name of an adapter that is loaded or has requests in flight."""
        return self._names[adapter_id]

    def find_names(self, adapter_ids: Iterable[int]) -> list[str]:
        """Return the names of adapters in the order of their ids, without those that were unloaded meanwhile."""
        return [self._names[each] for each in adapter_ids if each in self._names]

    def describe(self, resident: Sequence[int]) -> PodAdapters:
        """Return the names of all adapters, and of those with the ids ``resident``, which are in a slot."""
        return PodAdapters(loaded=list(self._model.adapters), resident=self.find_names(resident))

    async def load(self, name: str, uri: str, *, in_place: bool) -> None:
        """Load an adapter; with ``in_place`` it may replace one of the same name, whose requests finish.

        Raises:
            InvalidRequest: The name cannot be used or is taken, the adapter cannot be served, or none is.
            ModelNotFound: There is no adapter at the URI.
            QueueFull: Too many adapters are loaded at the time.
            Unavailable: The service does not accept requests, the adapter could not be downloaded, or the ranks did not read
                it in time.
        """
        self._check_load(name, in_place=in_place)
        self._loading.add(name)
        try:
            path = await self._locate(uri)
            self._last_id += 1
            served = self._model.make_adapter(self._last_id, name, uri)
            await self._send_load(served, path)
        finally:
            self._loading.discard(name)
        replaced = self._model.adapters.get(name)
        self._enter(served)
        log.event("adapter_loaded", adapter=name, uri=uri, adapter_id=served.adapter_id)
        if replaced is not None:
            self._retire(replaced)

    def leave_out(self, refused: AdapterRefused) -> None:
        """Remove an adapter of ``--lora`` that the ranks could not read at the start; no-op if it has been unloaded.

        Its requests may be on their way to the ranks, which fail them.
        """
        served = self._model.adapters.get(self._names.get(refused.adapter_id, ""))
        if served is not None and served.adapter_id == refused.adapter_id:
            del self._model.adapters[served.name]
            self._retire(served)

    def unload(self, name: str) -> None:
        """Unload an adapter: requests cannot choose it any more, and those that did finish.

        Raises:
            ModelNotFound: There is no such adapter.
        """
        adapter = self._model.adapters.pop(name, None)
        if adapter is None:
            raise ModelNotFound(f"the adapter {name[:200]!r} is not loaded", param="lora_name")
        log.event("adapter_unloaded", adapter=name, adapter_id=adapter.adapter_id)
        self._retire(adapter)

    def _check_load(self, name: str, *, in_place: bool) -> None:
        if not self._config.enable_lora:
            raise InvalidRequest("this service has no adapters; start it with --enable-lora")
        if name in self._loading:
            raise Unavailable(
                f"the adapter {name!r} is being loaded already; retry shortly",
                param="lora_name",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )
        check_new_adapter(
            name,
            model=self._model.name,
            loaded=self._model.adapters,
            count=len(self._names) + len(self._loading),
            replaces=in_place,
        )
        if len(self._loading) >= MAX_CONCURRENT_LOADS:
            raise QueueFull(
                f"{MAX_CONCURRENT_LOADS} adapters are being loaded; retry shortly",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )

    async def _locate(self, uri: str) -> str:
        """Return the directory of an adapter, which may be downloaded on a thread."""
        try:
            directory = await run_on_daemon_thread(
                lambda: locate_adapter(uri, self._config.adapters_dir), name="adapter-download"
            )
            return str(directory)
        except ConfigError as error:
            raise ModelNotFound(str(error), param="lora_path", code="adapter_not_found") from None
        except FetchError as error:
            raise Unavailable(str(error), param="lora_path", code="adapter_not_fetched") from None

    async def _send_load(self, served: ServedModel, path: str) -> None:
        adapter_id, reply = served.adapter_id, None
        try:
            reply = await self._rpc.call(
                lambda uid: LoadAdapter(uid, adapter_id, served.name, path),
                timeout_seconds=LOAD_TIMEOUT_SECONDS,
            )
        finally:
            if reply is None:  # a late success would leave it in memory, though no request could choose it
                self._scheduler.send(UnloadAdapter(adapter_id))
        if isinstance(reply, AdapterRefused):
            raise InvalidRequest(
                f"the adapter cannot be served: {reply.reason}", param="lora_path", code="adapter_refused"
            )

    def _enter(self, served: ServedModel) -> None:
        self._names[served.adapter_id] = served.name
        self._model.adapters[served.name] = served

    def _retire(self, adapter: ServedModel) -> None:
        """Have the ranks forget an adapter now, or when its last request has ended."""
        if not self._dispatcher.count_adapter_choices(adapter.adapter_id):
            self._forget(adapter.adapter_id)

    def _forget(self, adapter_id: int) -> None:
        """Have the ranks forget an adapter that has no request in flight, unless requests may choose it."""
        name = self._names[adapter_id]
        served = self._model.adapters.get(name)
        if served is None or served.adapter_id != adapter_id:
            del self._names[adapter_id]
            self._scheduler.send(UnloadAdapter(adapter_id))
