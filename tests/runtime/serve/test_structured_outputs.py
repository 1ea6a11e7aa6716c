"""Structured outputs of a whole service: sampled at a high temperature, each finished answer is valid."""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import openai
import pytest
from json_schemas import COUNT, varied_schemas
from jsonschema import Draft202012Validator
from service import running_service
from tiny_models import make_model

pytestmark = pytest.mark.integration

TEMPERATURE = 1.5
CONCURRENCY = 8


class SchemaClient:
    """Requests answers to schemas from one service, and validates each finished answer."""

    def __init__(self, url: str, name: str, max_tokens: int) -> None:
        self._client = openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=240)
        self._name = name
        self._max_tokens = max_tokens
        self._limit = asyncio.Semaphore(CONCURRENCY)
        self.reasons: Counter[str] = Counter()

    async def request_all(self, schemas: dict[str, dict[str, Any]]) -> None:
        numbered = list(enumerate(schemas.items()))
        await asyncio.gather(
            *(self._request(n, *item, stream=stream) for n, item in numbered for stream in (False, True))
        )
        await self._client.close()

    async def _request(self, seed: int, name: str, schema: dict[str, Any], *, stream: bool) -> None:
        named = {"type": "json_schema", "json_schema": {"name": "any", "schema": schema}}
        async with self._limit:
            text, reason = await self._answer(stream, seed=seed, response_format=named)
        self.reasons[reason] += 1
        if reason == "stop":
            fault = next(Draft202012Validator(schema).iter_errors(json.loads(text)), None)
            assert fault is None, f"{name}: {text}: {fault.message}"

    async def _answer(self, stream: bool, **options: Any) -> tuple[str, str]:
        reply: Any = await self._client.chat.completions.create(
            model=self._name,
            messages=[{"role": "user", "content": "Describe it as JSON."}],
            temperature=TEMPERATURE,
            max_tokens=self._max_tokens,
            stream=stream,
            **options,
        )
        if not stream:
            return reply.choices[0].message.content, reply.choices[0].finish_reason
        text, reason = "", ""
        async for chunk in reply:
            text += chunk.choices[0].delta.content or ""
            reason = chunk.choices[0].finish_reason or reason
        return text, reason


def run_schemas(model: str, schemas: dict[str, dict[str, Any]], *flags: str, max_tokens: int) -> Counter[str]:
    with running_service(
        model, "--served-model-name", "m", "--grammar-timeout-seconds", "60", *flags
    ) as service:
        client = SchemaClient(service.url, "m", max_tokens)
        asyncio.run(client.request_all(schemas))
        return client.reasons


def test_random_model_generates_valid_answers(tmp_path: Path) -> None:
    schemas = dict([*varied_schemas().items()][7::33])
    flags = ("--max-num-batched-tokens", "48", "--max-total-tokens", "1024")
    reasons = run_schemas(str(make_model(tmp_path)), schemas, *flags, max_tokens=100)
    assert sum(reasons.values()) == 2 * len(schemas)
    assert reasons["stop"] >= len(schemas) // 2, reasons


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("model", ["demo", "random"])
def test_200_schemas_are_answered_validly(tmp_path: Path, model: str, overlap: bool) -> None:
    path = "demo://" if model == "demo" else str(make_model(tmp_path))
    flags = () if overlap else ("--disable-overlap-schedule",)
    reasons = run_schemas(path, varied_schemas(), *flags, max_tokens=400)
    print(model, "overlap" if overlap else "no overlap", dict(reasons))
    assert sum(reasons.values()) == 2 * COUNT
    assert reasons["stop"] > COUNT, reasons
