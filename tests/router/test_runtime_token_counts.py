"""The router in front of the runtime's own front processes, as in a cluster."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from frontend import NAME, Frontend, echoing_frontend, write_model
from routers import make_config, router, run, until

from skiff_router.upstream import Address

CHAT = {"messages": [{"role": "user", "content": "boats and more boats"}]}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "stream": True}),
    ("/v1/completions", {"prompt": "boats", "stream": True}),
    ("/v1/messages", {**CHAT, "max_tokens": 300, "stream": True}),
    ("/v1/responses", {"input": "boats", "stream": True}),
    ("/v1/embeddings", {"input": "boats"}),
]


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    with echoing_frontend(write_model(tmp_path_factory.mktemp("model"))) as front:
        yield front


def test_tokens_of_every_endpoint_are_counted_as_the_runtime_counts_them(
    front: Frontend, tmp_path: Path
) -> None:
    """No stream here has a usage in its events, but for those of the Messages and the Responses API."""
    parts = urlsplit(front.url)
    assert parts.port is not None
    address, usage = Address("127.0.0.1", parts.port), tmp_path / "usage"

    async def test() -> None:
        config = make_config({NAME: (address,)}, usage_log=str(usage))
        async with router(config) as running:
            for path, body in BODIES:
                reply = await running.post(path, {"model": NAME, **body})
                assert reply.status_code == 200, reply.text
                assert "x-skiff-usage" not in reply.headers and "trailer" not in reply.headers

            async def written() -> bool:
                return usage.read_text().count("\n") == len(BODIES)

            await until(written)

    names = ("skiff_prompt_tokens_total", "skiff_cached_tokens_total", "skiff_generation_tokens_total")
    before = [front.metric(name) for name in names]
    run(test())
    lines = [json.loads(line) for line in usage.read_text().splitlines()]
    assert [line["endpoint"] for line in lines] == [path for path, _ in BODIES]
    assert not any(line["estimated"] for line in lines)
    assert all(line["prompt_tokens"] > 0 for line in lines)
    counted = [sum(line[f"{kind}_tokens"] for line in lines) for kind in ("prompt", "cached", "completion")]
    assert counted == [
        now - then for now, then in zip((front.metric(name) for name in names), before, strict=True)
    ]
