"""LoRA adapters at the router: their names, the pods that get their requests, and pods that do not have them yet."""

import json
from typing import Any

import msgspec
import pytest
from fake_pod import SNAPSHOT, Answer, PodRequest, json_response, pods
from routers import RunningRouter, make_config, router, run, until

from skiff_router.discovery import Discovery, InferenceService
from skiff_router.endpoints import MAX_RESIDENT_IMBALANCE, Backend, Endpoint, Registry, Route
from skiff_router.prompts import read_prompt
from skiff_router.request import read_body
from skiff_router.upstream import Address
from skiff_runtime.errors import InvalidRequest, ModelNotFound
from skiff_runtime.state_events import LoadChanged, PodAdapters, PodLoad

CHAT = "/v1/chat/completions"


def service(
    name: str, namespace: str, *adapters: dict[str, Any], model: str | None = None
) -> InferenceService:
    fields = {
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"model": {"uri": "demo://", "name": model}},
        "status": {"adapters": list(adapters)},
    }
    return msgspec.convert(fields, InferenceService)


def ready(name: str) -> dict[str, Any]:
    return {"name": name, "uri": "hf://org/x", "ready": True, "reason": "Loaded"}


@pytest.fixture
def registry() -> Registry:
    return Registry()


@pytest.fixture
def discovery(registry: Registry) -> Discovery:
    return Discovery(registry)


def test_an_adapter_is_found_by_its_name_and_by_that_of_its_service(
    registry: Registry, discovery: Discovery
) -> None:
    discovery.list_services([service("llama", "shop", ready("sql"), ready("org/law"))])
    (backend,) = registry.backends
    assert registry.find("sql") == registry.find("shop/llama/sql") == Route(backend, "sql")
    assert registry.find("shop/llama/org/law") == Route(backend, "org/law")
    assert registry.find("llama") == Route(backend)
    discovery.change_service("MODIFIED", service("llama", "shop", ready("sql")))
    with pytest.raises(ModelNotFound, match=r"models: llama, sql$"):
        registry.find("org/law")
    discovery.change_service("DELETED", service("llama", "shop"))
    with pytest.raises(ModelNotFound):
        registry.find("sql")


def test_nobody_takes_the_requests_of_another_by_a_name(registry: Registry, discovery: Discovery) -> None:
    discovery.list_services(
        [
            service("llama", "shop", ready("sql")),
            service("qwen", "bank", ready("sql"), ready("llama"), ready("shop/llama")),
        ]
    )
    llama = registry.find("llama")
    assert llama.backend.key == "shop/llama"
    assert registry.find("shop/llama") == llama, "an adapter does not hide a service"
    with pytest.raises(InvalidRequest, match="bank/qwen/sql, shop/llama/sql"):
        registry.find("sql")
    assert registry.find("bank/qwen/llama").adapter == "llama"
    assert registry.public_adapter_name(registry.find("qwen").backend, "llama") == "bank/qwen/llama"


def test_a_key_keeps_its_meaning_whatever_others_call_their_models_and_adapters(
    registry: Registry, discovery: Discovery
) -> None:
    discovery.list_services([service("llama", "shop", ready("sql"))])
    model, adapter = registry.find("shop/llama"), registry.find("shop/llama/sql")
    for change in (
        service("qwen", "bank", ready("shop/llama/sql"), model="shop/llama"),
        service("phi", "bank", model="shop/llama/sql"),
    ):
        discovery.change_service("ADDED", change)
        assert registry.find("shop/llama") == model and registry.find("shop/llama/sql") == adapter
    qwen, phi = registry.find("bank/qwen").backend, registry.find("bank/phi").backend
    assert (qwen.model, phi.model) == ("shop/llama", "shop/llama/sql")
    assert registry.public_name(qwen) == "bank/qwen" and registry.public_name(phi) == "bank/phi"
    assert registry.public_adapter_name(qwen, "shop/llama/sql") == "bank/qwen/shop/llama/sql"
    assert registry.find("bank/qwen/shop/llama/sql") == Route(qwen, "shop/llama/sql")


@pytest.mark.parametrize(
    ("adapter", "served"),
    [
        ({"name": "sql", "reason": "Loading"}, True),
        ({"name": "sql", "reason": "NoPods"}, True),
        ({"name": "sql", "reason": "AdapterRefused"}, False),
        ({"name": "sql", "reason": "AdapterRefused", "loadedPods": 2}, True),
        ({"name": "sql", "reason": "NameConflict"}, False),
    ],
)
def test_only_adapters_that_some_pod_may_have_are_served(
    registry: Registry, discovery: Discovery, adapter: dict[str, Any], served: bool
) -> None:
    discovery.list_services([service("llama", "shop", {"uri": "hf://org/x", **adapter})])
    assert registry.backends[0].adapters == ({"sql": False} if served else {})


def endpoint(name: str, adapters: PodAdapters | None, in_flight: int = 0) -> Endpoint:
    made = Endpoint(name, Address("127.0.0.1", 1), in_flight=in_flight)
    made.pod.adapters = adapters
    return made


def test_pods_with_the_adapter_in_a_slot_are_preferred_until_they_are_busy() -> None:
    backend = Backend("shop/llama", "llama")
    without = endpoint("without", PodAdapters())
    loaded = endpoint("loaded", PodAdapters(loaded=["sql"]))
    resident = endpoint("resident", PodAdapters(loaded=["sql"], resident=["sql"]))
    silent = endpoint("silent", None)
    assert backend.select_adapter([without, loaded, resident, silent], "sql") == [resident]
    assert backend.select_adapter([without, loaded, silent], "sql") == [loaded, silent]
    assert backend.select_adapter([without], "sql") == [without], "it says so itself"
    resident.in_flight = MAX_RESIDENT_IMBALANCE
    assert backend.select_adapter([loaded, resident], "sql") == [resident]
    resident.in_flight += 1
    assert backend.select_adapter([loaded, resident], "sql") == [loaded, resident]


def answers(name: str, adapters: set[str]) -> Answer:
    """Answer as a pod with these adapters does."""

    async def answer(request: PodRequest, writer: Any) -> None:
        model = json.loads(request.body)["model"]
        if model in ("a", *adapters):
            writer.write(json_response(json.dumps({"pod": name, "model": model}).encode()))
        else:
            body = {"error": {"message": f"the model {model!r} does not exist", "code": "model_not_found"}}
            writer.write(json_response(json.dumps(body).encode(), "404 Not Found"))

    return answer


def serve_adapter(running: RunningRouter) -> Backend:
    """Let the router know an adapter of its only model."""
    registry = running.server._registry
    (backend,) = registry.backends
    registry.set_adapters(backend, {"sql": True})
    return backend


def test_a_pod_that_lacks_the_adapter_is_no_failure() -> None:
    async def test() -> None:
        old, new = {"sql"}, set[str]()
        async with pods(answers("old", old), answers("new", new)) as (first, second):
            config = make_config({"a": (first.address, second.address)}, policy="round-robin")
            async with router(config) as running:
                serve_adapter(running)
                for _ in range(6):
                    reply = await running.post(CHAT, {"model": "sql"})
                    assert (reply.status_code, reply.json()) == (200, {"pod": "old", "model": "sql"})
                reply = await running.post(CHAT, {"model": "a/sql"})
                assert reply.json() == {"pod": "old", "model": "sql"}, "pods know the adapter's own name"
                old.clear()
                reply = await running.post(CHAT, {"model": "sql"})
                assert (reply.status_code, reply.headers["retry-after"]) == (503, "2")
                models = (await running.client.get("/v1/models")).json()["data"]
                assert [(each["id"], each.get("parent"), each.get("ready")) for each in models] == [
                    ("a", None, None),
                    ("sql", "a", True),
                ]

    run(test())


def test_a_response_that_is_not_found_is_no_missing_adapter() -> None:
    async def answer(request: PodRequest, writer: Any) -> None:
        body = {"error": {"message": "no response has the id 'resp_1'", "code": "response_not_found"}}
        writer.write(json_response(json.dumps(body).encode(), "404 Not Found"))

    async def test() -> None:
        async with (
            pods(answer, answer) as (first, second),
            router(make_config({"a": (first.address, second.address)})) as running,
        ):
            serve_adapter(running)
            body = {"model": "sql", "input": "Hi", "previous_response_id": "resp_1"}
            response = await running.post("/v1/responses", body)
            assert response.status_code == 404 and response.json()["error"]["code"] == "response_not_found"
            assert len(first.requests) + len(second.requests) == 1, "no other pod is asked"

    run(test())


def test_pods_report_their_adapters_by_events() -> None:
    async def test() -> None:
        async with pods(answers("one", {"sql"}), answers("two", {"sql"})) as (one, two):
            one.reports = two.reports = True
            one.snapshot = msgspec.structs.replace(SNAPSHOT, adapters=PodAdapters(["sql"], []))
            two.snapshot = msgspec.structs.replace(SNAPSHOT, adapters=PodAdapters(["sql"], ["sql"]))
            async with router(make_config({"a": (one.address, two.address)})) as running:
                backend = serve_adapter(running)

                async def known() -> bool:
                    return all(each.pod.adapters is not None for each in backend.endpoints)

                await until(known)
                replies = [await running.post(CHAT, {"model": "sql"}) for _ in range(5)]
                assert {reply.json()["pod"] for reply in replies} == {"two"}
                load = PodLoad(max_requests=1000, max_running=100, max_step_tokens=2048)
                two.report(LoadChanged("ready", load))
                one.report(LoadChanged("ready", load, PodAdapters(["sql"], ["sql"])))
                two.report(LoadChanged("ready", load, PodAdapters(["sql"], [])))

                async def moved() -> bool:
                    reply = await running.post(CHAT, {"model": "sql"})
                    return bool(reply.json()["pod"] == "one")

                await until(moved)

    run(test())


def test_prompts_of_an_adapter_are_cached_apart() -> None:
    backend = Backend("a", "a")
    fields = read_body(json.dumps({"model": "a", "prompt": "x" * 3000}).encode())
    base = read_prompt(fields, backend, b"", with_blocks=True)
    adapted = read_prompt(fields, backend, b"", adapter="sql", with_blocks=True)
    assert len(base.blocks) == len(adapted.blocks) == 2
    assert not set(base.blocks) & set(adapted.blocks)
