"""LoRA adapters over HTTP: loaded, listed, chosen, replaced and unloaded, against real frontend processes."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from event_client import following
from frontend import NAME, Frontend, echoing_frontend, running_frontend, write_model
from openai import OpenAI

from skiff_runtime.errors import ModelNotFound
from skiff_runtime.messages import (
    AdapterLoaded,
    AdapterRefused,
    CacheEvents,
    FinishReason,
    KVBlocksStored,
    LoadAdapter,
    RequestFailed,
    StepStats,
    UnloadAdapter,
    WatchCache,
)
from skiff_runtime.processes.launch import StartAdapter
from skiff_runtime.prompt_blocks import adapter_namespace, hash_body
from skiff_runtime.state_events import BlockStored, KVBlocksChanged, LoadChanged, PodAdapters, Snapshot

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of adapters, of which the scheduler sees no more than the path."""
    directory = tmp_path_factory.mktemp("adapters")
    for name in ("sql", "chat", "refused"):
        (directory / name).mkdir()
        (directory / name / "adapter_config.json").write_text("{}")
    return directory


@pytest.fixture
def front(model: Path, directory: Path) -> Iterator[Frontend]:
    start = StartAdapter(1, "start", "hf://acme/start", str(directory / "sql"))
    with echoing_frontend(model, adapters=(start,), enable_lora=True, tokenizer_worker_num=2) as front:
        yield front


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def names(front: Frontend) -> list[str]:
    return [each["id"] for each in front.get("/v1/models").json()["data"]]


def load(front: Frontend, name: str, path: Path, **more: object) -> None:
    response = front.post(LOAD, lora_name=name, lora_path=str(path), **more)
    assert response.status_code == 200, response.text
    assert response.text == f"Success: LoRA adapter '{name}' added successfully."


def test_adapters_are_listed_with_their_files_and_their_model(front: Frontend, directory: Path) -> None:
    load(front, "sql", directory / "sql")
    cards = front.get("/v1/models").json()["data"]
    assert [(each["id"], each["root"], each["parent"]) for each in cards] == [
        (NAME, cards[0]["root"], None),
        ("start", "hf://acme/start", NAME),
        ("sql", str(directory / "sql"), NAME),
    ]
    assert front.get("/v1/models/sql").json() == cards[2]
    assert front.post(UNLOAD, lora_name="sql").text == "Success: LoRA adapter 'sql' removed successfully."
    assert names(front) == [NAME, "start"]
    assert front.get("/v1/models/sql").status_code == 404


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a b"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 8}),
        ("/v1/embeddings", {"input": "a b"}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
    ],
)
def test_every_endpoint_chooses_an_adapter_by_model(
    front: Frontend, path: str, body: dict[str, object]
) -> None:
    assert front.echo is not None
    for name, adapter_id in (("start", 1), (NAME, 0)):
        front.echo.requests.clear()
        response = front.post(path, model=name, **body)
        assert response.status_code == 200, response.text
        assert response.json()["model"] == name
        assert {each.adapter_id for each in front.echo.requests} == {adapter_id}
    response = front.post(path, model="stranger", **body)
    assert response.status_code == 404 and "stranger" in response.text


def test_native_endpoint_chooses_by_the_name_of_sglang_and_the_tokenizer_knows_adapters(
    front: Frontend,
) -> None:
    assert front.echo is not None
    assert front.post("/generate", text="a b", lora_path="start").status_code == 200
    assert front.echo.requests[-1].adapter_id == 1
    assert front.post("/generate", text="a b", model="start").status_code == 200
    assert front.echo.requests[-1].adapter_id == 1
    assert front.post("/generate", text="a b", model=NAME, lora_path="start").status_code == 400
    assert front.post("/generate", text="a b", lora_path="stranger").status_code == 404
    assert front.post("/tokenize", prompt="a b", model="start").status_code == 200


def test_choices_and_prompts_of_one_request_run_on_its_adapter(front: Frontend) -> None:
    assert front.echo is not None
    response = front.post("/v1/completions", model="start", prompt=["a b", "c"], n=2)
    assert len(response.json()["choices"]) == 4
    assert [each.adapter_id for each in front.echo.requests] == [1] * 4


def test_official_client_streams_from_an_adapter(front: Frontend) -> None:
    client = OpenAI(base_url=f"{front.url}/v1", api_key="none")
    chunks = list(client.completions.create(model="start", prompt="hello", stream=True))
    assert {chunk.model for chunk in chunks} == {"start"}
    assert [each.id for each in client.models.list()] == [NAME, "start"]


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"lora_name": "refused", "lora_path": "DIR/refused"}, 400, "its rank is 64"),
        ({"lora_name": "none", "lora_path": "DIR/none"}, 404, "no adapter found"),
        ({"lora_name": "none", "lora_path": "ftp://host/none"}, 404, "unknown scheme"),
        ({"lora_name": "start", "lora_path": "DIR/sql"}, 400, "loaded already"),
        ({"lora_name": NAME, "lora_path": "DIR/sql"}, 400, "name of the served model"),
        ({"lora_name": "a,b", "lora_path": "DIR/sql"}, 400, "commas"),
        ({"lora_name": "", "lora_path": "DIR/sql"}, 400, "lora_name"),
        ({"lora_name": "sql"}, 400, "lora_path"),
        ({"lora_name": "sql", "lora_path": "DIR/sql", "rank": 3}, 400, "rank"),
    ],
)
def test_bad_load_is_refused_with_its_reason_and_changes_nothing(
    front: Frontend, directory: Path, body: dict[str, str], status: int, words: str
) -> None:
    if "lora_path" in body:
        body = {**body, "lora_path": body["lora_path"].replace("DIR", str(directory))}
    response = front.post(LOAD, **body)
    assert (response.status_code, words in response.json()["error"]["message"]) == (status, True), (
        response.text
    )
    assert names(front) == [NAME, "start"]
    assert front.post("/v1/completions", model="start", prompt="a").status_code == 200


def test_unload_of_a_stranger_is_a_404(front: Frontend) -> None:
    response = front.post(UNLOAD, lora_name="stranger", lora_int_id=3)
    assert response.status_code == 404 and "stranger" in response.text


def test_replaced_adapter_gets_another_id_and_the_old_one_goes(front: Frontend, directory: Path) -> None:
    assert front.echo is not None
    load(front, "sql", directory / "sql")
    load(front, "sql", directory / "chat", load_inplace=True)
    [old, new] = sorted({2, 3})
    assert front.post("/v1/completions", model="sql", prompt="a").status_code == 200
    assert front.echo.requests[-1].adapter_id == new
    wait_for(lambda: front.echo is not None and old not in front.echo.adapters)
    assert front.echo.adapters[new].path == str(directory / "chat")
    assert names(front) == [NAME, "start", "sql"]


def test_unload_waits_for_requests_in_flight_and_refuses_new_ones(model: Path, directory: Path) -> None:
    with running_frontend(model, enable_lora=True) as front:
        loading = threading.Thread(target=load, args=(front, "sql", directory / "sql"))
        loading.start()
        message = front.rank.receive()
        assert isinstance(message, LoadAdapter) and message.adapter_id == 1 and message.name == "sql"
        front.rank.step([], adapters=[AdapterLoaded(message.uid, message.adapter_id)])
        loading.join()
        running = threading.Thread(
            target=front.post, args=("/v1/completions",), kwargs={"model": "sql", "prompt": "a"}
        )
        running.start()
        request = front.rank.request()
        assert request.adapter_id == 1
        assert front.post(UNLOAD, lora_name="sql").status_code == 200
        assert front.post("/v1/completions", model="sql", prompt="a").status_code == 404
        assert front.rank.poll() == []
        front.rank.start(request)
        front.rank.finish(request.uid, FinishReason.STOP)
        assert front.rank.receive() == UnloadAdapter(1)
        running.join()


def test_adapter_that_the_ranks_could_not_read_at_the_start_is_left_out(front: Frontend) -> None:
    assert names(front) == [NAME, "start"]
    front.rank.step([], adapters=[AdapterRefused(0, 1, "the file is cut short")])
    wait_for(lambda: names(front) == [NAME])
    assert front.post("/v1/completions", model="start", prompt="a").status_code == 404


def test_request_of_an_adapter_that_the_ranks_refuse_meanwhile_is_not_found(
    model: Path, directory: Path
) -> None:
    start = StartAdapter(1, "start", "hf://acme/start", str(directory / "sql"))
    with running_frontend(model, adapters=(start,), enable_lora=True) as front:
        with ThreadPoolExecutor(1) as pool:
            pending = pool.submit(front.post, "/v1/completions", model="start", prompt="a")
            request = front.rank.request()
            front.rank.step([], adapters=[AdapterRefused(0, 1, "the file is cut short")])
            wait_for(lambda: names(front) == [NAME])
            error = ModelNotFound("the adapter has been unloaded", param="model")
            front.rank.step([], failed=[RequestFailed.of(request.uid, error)])
            assert pending.result(30).status_code == 404
        assert front.get("/readyz").status_code == 200


def test_refusal_of_an_adapter_leaves_the_one_that_replaced_it(model: Path, directory: Path) -> None:
    start = StartAdapter(1, "start", "hf://acme/start", str(directory / "sql"))
    with echoing_frontend(model, adapters=(start,), enable_lora=True) as front:
        load(front, "start", directory / "chat", load_inplace=True)
        front.rank.step([], adapters=[AdapterRefused(0, 1, "the file is cut short")])
        load(front, "sql", directory / "sql")  # the refusal has arrived before
        assert names(front) == [NAME, "start", "sql"]


def test_router_learns_of_adapters_and_their_blocks(front: Frontend, directory: Path) -> None:
    with following(front.url, "prompt_blocks", "kv_blocks") as events:
        snapshot = events.next()
        assert isinstance(snapshot, Snapshot) and snapshot.adapters == PodAdapters(["start"], [])
        load(front, "sql", directory / "sql")
        changed = events.until(lambda event: isinstance(event, LoadChanged) and event.adapters is not None)
        assert isinstance(changed, LoadChanged) and changed.adapters == PodAdapters(["start", "sql"], [])
        stored = KVBlocksStored([5, 6], None, adapter_id=2, adapter_name="sql")
        cached = CacheEvents(False, b"", b"", [stored, KVBlocksStored([7], None)])
        front.rank.step([], stats=StepStats(resident_adapters=[2]), cache_events=cached)
        blocks = events.until(lambda event: isinstance(event, KVBlocksChanged) and len(event.events) > 1)
        assert isinstance(blocks, KVBlocksChanged)
        expected = [
            BlockStored([5, 6], None, 16, lora_id=2, lora_name="sql"),
            BlockStored([7], None, 16),
        ]
        assert blocks.events == expected
        with following(front.url, "kv_blocks") as late:
            again, whole = late.next(), late.next()
            assert isinstance(again, Snapshot) and again.adapters == PodAdapters(["start", "sql"], ["sql"])
            assert isinstance(whole, KVBlocksChanged) and whole.events[1:] == expected


def test_prompt_blocks_of_an_adapter_have_names_of_their_own(model: Path, directory: Path) -> None:
    start = StartAdapter(1, "start", "hf://acme/start", str(directory / "sql"))
    prompt, found = "boat " * 220, {}
    with (
        running_frontend(model, adapters=(start,), enable_lora=True) as front,
        following(front.url, "prompt_blocks") as events,
    ):
        events.next()
        assert isinstance(front.rank.receive(), WatchCache)
        for name in (NAME, "start"):
            body = {"model": name, "prompt": prompt}
            sender = threading.Thread(target=front.post, args=("/v1/completions",), kwargs=body)
            sender.start()
            request = front.rank.request()
            front.rank.start(request)
            front.rank.finish(request.uid, FinishReason.LENGTH)
            sender.join()
            found[name] = request.prompt_blocks
    raw = json.dumps({"prompt": prompt}).encode()
    assert found == {
        NAME: hash_body(raw, b""),
        "start": hash_body(raw, adapter_namespace(b"", "start")),
    }
    assert found[NAME] != found["start"]


def test_service_without_adapters_says_how_to_start_it(model: Path, directory: Path) -> None:
    with echoing_frontend(model) as front:
        response = front.post(LOAD, lora_name="sql", lora_path=str(directory / "sql"))
        assert response.status_code == 400 and "--enable-lora" in response.text


def test_loading_needs_an_admin_key(model: Path, directory: Path) -> None:
    body = {"lora_name": "sql", "lora_path": str(directory / "sql")}
    options = {"api_key": ("user-key-123456789",), "admin_api_key": ("admin-key-123456789",)}
    with echoing_frontend(model, enable_lora=True, **options) as front:
        for key, status in ((None, 401), ("user-key-123456789", 403), ("admin-key-123456789", 200)):
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            assert front.http.post(front.url + LOAD, json=body, headers=headers).status_code == status
