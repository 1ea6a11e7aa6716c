"""The controller of LoRA adapters, with an API server that refuses old versions."""

import asyncio
from typing import Any, cast

from services import service

from skiff_operator.cache import Cache
from skiff_operator.client import Client
from skiff_operator.errors import ApiConflict
from skiff_operator.kinds import Kind
from skiff_operator.lora import plan
from skiff_operator.lora.controller import LoRAController
from skiff_operator.lora.index import Index
from skiff_operator.lora.plan import PodAdapters
from skiff_operator.settings import Settings

KEY = ("default", "llama")
SERVICE = service(lora={})


def lora_adapter(uri: str, generation: int) -> dict[str, Any]:
    """A LoRAAdapter as the API server has it; each generation has a version of its own."""
    meta = {"namespace": "default", "name": "sql", "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z"}
    version = {"generation": generation, "resourceVersion": str(generation)}
    return {"metadata": {**meta, **version}, "spec": {"modelRef": {"name": "llama"}, "uri": uri}}


class Api:
    """Accepts the status of the newest version alone."""

    def __init__(self, version: str) -> None:
        self._version = version
        self.statuses: list[dict[str, Any]] = []

    async def apply(
        self, _kind: Kind, _namespace: str, _name: str, body: dict[str, Any], *, subresource: str
    ) -> dict[str, Any]:
        """Record a status."""
        if body["metadata"]["resourceVersion"] != self._version:
            raise ApiConflict("the object has been modified")
        self.statuses.append(body["status"])
        return {"metadata": {"resourceVersion": "9"}}


def test_an_adapter_that_is_edited_during_a_pass_is_not_reported_by_what_the_pass_has_seen() -> None:
    index, api = Index(), Api("2")

    async def run() -> None:
        controller = LoRAController(
            Cache(), index, cast(Client, api), lambda _: None, Settings(), synced=lambda _: True
        )
        index.observe("ADDED", lora_adapter("hf://org/old", 1))
        adapters = index.of(KEY)
        [wanted] = plan.desired_adapters(SERVICE, adapters)
        loaded = PodAdapters("pod", {"sql": wanted.path}, {"sql": wanted.path}, {}, None)
        index.observe("MODIFIED", lora_adapter("hf://org/new", 2))
        await controller._report(KEY, None, adapters, [plan.status(wanted, [loaded])])
        await controller.close()

    asyncio.run(run())
    assert api.statuses == []
