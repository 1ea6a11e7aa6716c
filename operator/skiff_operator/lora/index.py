"""The index of LoRAAdapters, filled by their watch: small records, by the InferenceService that they name."""

from typing import Any

import msgspec

from skiff_operator.errors import InvalidSpec
from skiff_operator.log import logger
from skiff_operator.lora.report import ObjectStatus
from skiff_operator.lora.spec import LoRAAdapter, parse
from skiff_operator.watch_streams import Event, StreamKey
from skiff_operator.workqueue import Key


class Index:
    """The LoRAAdapters as they were last observed. Each method returns the services whose adapters may have changed."""

    def __init__(self) -> None:
        """Create an empty index."""
        self._adapters: dict[str, LoRAAdapter] = {}
        self._by_service: dict[Key, dict[str, LoRAAdapter]] = {}

    def __contains__(self, key: Key) -> bool:
        """Return whether a LoRAAdapter names this InferenceService."""
        return key in self._by_service

    def services(self) -> list[Key]:
        """Return the keys of the InferenceServices that LoRAAdapters name, existing or not."""
        return list(self._by_service)

    def of(self, key: Key) -> list[LoRAAdapter]:
        """Return the LoRAAdapters of an InferenceService, the oldest first."""
        return sorted(self._by_service.get(key, {}).values(), key=_age)

    def observe(self, event: Event, obj: dict[str, Any]) -> set[Key]:
        """Observe one object of a list or a watch event."""
        uid = obj["metadata"]["uid"]
        if event == "DELETED":
            return self._drop(uid)
        try:
            found = parse(obj)
        except InvalidSpec as error:
            extra = {
                "object": f"{obj['metadata']['namespace']}/{obj['metadata']['name']}",
                "error": str(error),
            }
            logger.error("LoRAAdapter not understood", extra=extra)
            return self._drop(uid)
        known = self._adapters.get(uid)
        if known is not None and int(found.resource_version) <= int(known.resource_version):
            return set()
        concerned = self._drop(uid)
        self._adapters[uid] = found
        self._by_service.setdefault(found.service, {})[uid] = found
        if known is not None and (known.spec, known.status) == (found.spec, found.status):
            return set()
        return concerned | {found.service}

    def observe_list_end(self, stream: StreamKey, shown: set[str], resource_version: int) -> set[Key]:
        """Observe the end of a list: forget objects that it lacks, unless they are newer."""
        gone = [
            uid
            for uid, each in self._adapters.items()
            if stream.namespace in (None, each.namespace)
            and uid not in shown
            and int(each.resource_version) <= resource_version
        ]
        return {key for uid in gone for key in self._drop(uid)}

    def observe_status(self, uid: str, resource_version: str, status: ObjectStatus) -> None:
        """Observe the API server's response to our own status, so that its echo on the watch causes no work."""
        known = self._adapters.get(uid)
        if known is not None and int(resource_version) > int(known.resource_version):
            found = msgspec.structs.replace(known, resource_version=resource_version, status=status)
            self._adapters[uid] = self._by_service[found.service][uid] = found

    def _drop(self, uid: str) -> set[Key]:
        known = self._adapters.pop(uid, None)
        if known is None:
            return set()
        others = self._by_service[known.service]
        del others[uid]
        if not others:
            del self._by_service[known.service]
        return {known.service}


def _age(adapter: LoRAAdapter) -> tuple[str, str]:
    return adapter.created_at, adapter.name
