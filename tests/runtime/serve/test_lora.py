"""LoRA adapters in a whole service: many over few slots, each request with the tokens of its own adapter."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import lora_models
import pytest
from gpus import needs_gpus
from service import Service, running_service, wait_until
from tiny_models import greedy_tokens, load_reference, make_model

pytestmark = pytest.mark.integration

PROMPT = [5, 17, 30, 9, 44, 12, 3]
COUNT = 8
NAMES = ("first", "second", "third", "fourth")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and its adapters, of different ranks, one of them too large."""
    directory = tmp_path_factory.mktemp("lora")
    make_model(directory / "model")
    for seed, name in enumerate(NAMES):
        lora_models.make_adapter(
            directory / name, directory / "model", seed=seed, r=2 + 2 * seed, use_rslora=seed == 3
        )
    lora_models.make_adapter(directory / "large", directory / "model", seed=9, r=32)
    return directory


@pytest.fixture(scope="module")
def expected(files: Path) -> dict[str, list[int]]:
    model = files / "model"
    tokens = {
        name: greedy_tokens(lora_models.load_adapted(model, files / name), PROMPT, COUNT) for name in NAMES
    }
    tokens["model"] = greedy_tokens(load_reference(model), PROMPT, COUNT)
    assert len(set(map(tuple, tokens.values()))) == len(tokens), "the adapters must differ"
    return tokens


@pytest.fixture(
    scope="module",
    params=[pytest.param(1, id="one rank"), pytest.param(2, id="two ranks", marks=needs_gpus(2))],
)
def service(files: Path, request: pytest.FixtureRequest) -> Iterator[Service]:
    flags = ["--max-loras", "2", "--max-cpu-loras", "2", "--max-lora-rank", "8", "--dtype", "float32"]
    flags += ["--lora", f"first={files / 'first'}", "--lora", f"large={files / 'large'}"]
    flags += ["--max-total-tokens", "4096", "--tp", str(request.param)]
    with running_service(files / "model", *flags) as service:
        wait_until(lambda: names(service) == ["model", "first"])  # the large one is left out
        for name in NAMES[1:]:
            assert load(service, name, files / name) == 200
        yield service


def names(service: Service) -> list[str]:
    return [each["id"] for each in service.http.get(service.url + "/v1/models").json()["data"]]


def load(service: Service, name: str, path: Path) -> int:
    body = {"lora_name": name, "lora_path": str(path), "load_inplace": True}
    return service.http.post(service.url + "/v1/load_lora_adapter", json=body).status_code


def unload(service: Service, name: str) -> int:
    return service.http.post(service.url + "/v1/unload_lora_adapter", json={"lora_name": name}).status_code


def generate(service: Service, name: str) -> list[int]:
    body = {
        "model": name,
        "token_ids": PROMPT,
        "max_tokens": COUNT,
        "temperature": 0,
        "ignore_eos": True,
    }
    response = service.http.post(service.url + "/generate", json=body)
    assert response.status_code == 200, response.text
    tokens: list[int] = response.json()["token_ids"]
    return tokens


def test_requests_of_all_adapters_at_once_get_their_own_tokens(
    service: Service, expected: dict[str, list[int]]
) -> None:
    wanted = [*expected] * 6
    with ThreadPoolExecutor(len(wanted)) as pool:
        found = list(pool.map(lambda name: generate(service, name), wanted))
    assert found == [expected[name] for name in wanted]
    assert service.metric("skiff_lora_slot_evictions_total") > 0
    assert service.metric("skiff_lora_reads_total") > len(NAMES)  # host memory holds two


def test_bad_adapter_is_refused_and_the_others_go_on(
    service: Service, files: Path, expected: dict[str, list[int]]
) -> None:
    body = {"lora_name": "large", "lora_path": str(files / "large")}
    response = service.http.post(service.url + "/v1/load_lora_adapter", json=body)
    assert response.status_code == 400 and "32" in response.json()["error"]["message"]
    assert generate(service, "second") == expected["second"]


def test_replaced_adapter_shares_nothing_with_the_one_before(
    service: Service, files: Path, expected: dict[str, list[int]]
) -> None:
    assert load(service, "swapped", files / "first") == 200
    assert generate(service, "swapped") == expected["first"]
    assert load(service, "swapped", files / "second") == 200
    assert generate(service, "swapped") == expected["second"]
    assert unload(service, "swapped") == 200
    body = {"model": "swapped", "token_ids": PROMPT}
    assert service.http.post(service.url + "/generate", json=body).status_code == 404


def test_many_loads_and_unloads_leave_nothing_behind(
    service: Service, files: Path, expected: dict[str, list[int]]
) -> None:
    for turn in range(30):
        name = NAMES[turn % len(NAMES)]
        assert load(service, f"cycled-{turn}", files / name) == 200
        assert generate(service, f"cycled-{turn}") == expected[name]
        assert unload(service, f"cycled-{turn}") == 200
    assert names(service) == ["model", *NAMES]
    wait_until(lambda: service.metric('skiff_kv_cache_pages{state="used"}') == 0)
    assert service.metric("skiff_lora_adapters") == len(NAMES)
