"""Structured answers of real models in a whole service: hot and senseless as they are, each finished one is valid."""

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

TEMPERATURE = 1.5
AT_A_TIME = 8


class Asker:
    """Asks one service for answers to schemas, and validates each finished one."""

    def __init__(self, url: str, name: str, max_tokens: int) -> None:
        self._client = openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=240)
        self._name = name
        self._max_tokens = max_tokens
        self._turn = asyncio.Semaphore(AT_A_TIME)
        self.reasons: Counter[str] = Counter()

    async def ask_all(self, schemas: dict[str, dict[str, Any]]) -> None:
        asked = list(enumerate(schemas.items()))
        await asyncio.gather(
            *(self._ask(n, *item, stream=stream) for n, item in asked for stream in (False, True))
        )
        await self._client.close()

    async def _ask(self, seed: int, name: str, schema: dict[str, Any], *, stream: bool) -> None:
        named = {"type": "json_schema", "json_schema": {"name": "any", "schema": schema}}
        async with self._turn:
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


def check_answers(
    model: str, schemas: dict[str, dict[str, Any]], *flags: str, max_tokens: int
) -> Counter[str]:
    with running_service(
        model, "--served-model-name", "m", "--grammar-timeout-seconds", "60", *flags
    ) as service:
        asker = Asker(service.url, "m", max_tokens)
        asyncio.run(asker.ask_all(schemas))
        return asker.reasons


def test_a_random_model_writes_valid_answers(tmp_path: Path) -> None:
    schemas = dict([*varied_schemas().items()][7::33])
    flags = ("--max-num-batched-tokens", "48", "--max-total-tokens", "1024")
    reasons = check_answers(str(make_model(tmp_path)), schemas, *flags, max_tokens=100)
    assert sum(reasons.values()) == 2 * len(schemas)
    assert reasons["stop"] >= len(schemas) // 2, reasons


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("model", ["demo", "random"])
def test_two_hundred_schemas(tmp_path: Path, model: str, overlap: bool) -> None:
    path = "demo://" if model == "demo" else str(make_model(tmp_path))
    flags = () if overlap else ("--disable-overlap-schedule",)
    reasons = check_answers(path, varied_schemas(), *flags, max_tokens=400)
    print(model, "overlap" if overlap else "no overlap", dict(reasons))
    assert sum(reasons.values()) == 2 * COUNT
    assert reasons["stop"] > COUNT, reasons
