"""LoRA adapters of an ``LLM``: their names, loads and unloads."""

from collections.abc import Sequence
from typing import Final

from skiff_runtime.config import Config
from skiff_runtime.config.adapters import check_new_adapter, parse_adapters
from skiff_runtime.errors import ConfigError, InvalidRequest, ModelNotFound
from skiff_runtime.messages import AdapterRefused
from skiff_runtime.offline.request_tracker import RequestTracker
from skiff_runtime.processes.adapter_files import locate_adapter

LoraChoice = str | Sequence[str | None] | None
"""Adapters of several prompts: one name for all, or for each its own name or None for the base model."""
MAX_LISTED_NAMES: Final = 10


class LoadedAdapters:
    """Maps the names of loaded adapters to the ids by which the ranks know them."""

    def __init__(self, config: Config, tracker: RequestTracker) -> None:
        """``config``: resolved."""
        self._config = config
        self._tracker = tracker
        self._ids: dict[str, int] = {}
        self._last_id = 0

    def load_configured(self) -> None:
        """Load the adapters of the option ``lora``.

        Raises:
            ConfigError: One of them is not there or cannot be served.
            FetchError: One could not be downloaded.
        """
        for each in parse_adapters(self._config.lora):
            try:
                self.load(each.name, each.uri, replaces=False)
            except InvalidRequest as error:
                raise ConfigError(f"lora {each.name}={each.uri}: {error}") from None

    def load(self, name: str, uri: str, *, replaces: bool) -> None:
        """Load an adapter, which requests may choose from now on.

        Raises:
            InvalidRequest: The name cannot be used or is taken, the adapter cannot be served, or none is.
            ConfigError: There is no adapter at the URI.
            FetchError: It could not be downloaded.
            Unavailable: A rank has ended or hangs.
        """
        config = self._config
        if not config.enable_lora:
            raise InvalidRequest("this LLM has no adapters; create it with enable_lora=True")
        assert config.served_model_name is not None, "the configuration is resolved"
        check_new_adapter(
            name, model=config.served_model_name, loaded=self._ids, count=len(self._ids), replaces=replaces
        )
        path = locate_adapter(uri, config.adapters_dir)
        self._last_id += 1
        reply = self._tracker.load_adapter(self._last_id, name, str(path))
        if isinstance(reply, AdapterRefused):
            raise InvalidRequest(f"the adapter cannot be served: {reply.reason}", code="adapter_refused")
        replaced = self._ids.get(name)
        self._ids[name] = reply.adapter_id
        if replaced is not None:
            self._tracker.unload_adapter(replaced)

    def unload(self, name: str) -> None:
        """Unload an adapter: requests cannot choose it any more, and those that did finish.

        Raises:
            ModelNotFound: There is no such adapter.
        """
        adapter_id = self.find(name)
        del self._ids[name]
        self._tracker.unload_adapter(adapter_id)

    def find(self, name: str | None) -> int:
        """Return the id of an adapter, 0 for None, the base model. Raises ModelNotFound if it is not loaded."""
        if name is None:
            return 0
        found = self._ids.get(name)
        if found is None:
            raise ModelNotFound(
                f"the adapter {name[:200]!r} is not loaded; {self._describe_loaded()}", param="lora"
            )
        return found

    def find_each(self, choice: LoraChoice, count: int) -> list[int]:
        """Return the ids for ``count`` prompts.

        Raises:
            ModelNotFound: An adapter is not loaded.
            InvalidRequest: There are more or fewer names than prompts.
        """
        if choice is None or isinstance(choice, str):
            return [self.find(choice)] * count
        if len(choice) != count:
            raise InvalidRequest(
                f"{count} prompts need one adapter or {count}, not {len(choice)}", param="lora"
            )
        return [self.find(each) for each in choice]

    def _describe_loaded(self) -> str:
        if not self._ids:
            return "no adapter is"
        names = list(self._ids)
        more = f" and {len(names) - MAX_LISTED_NAMES} more" if len(names) > MAX_LISTED_NAMES else ""
        return f"these are: {', '.join(names[:MAX_LISTED_NAMES])}{more}"
