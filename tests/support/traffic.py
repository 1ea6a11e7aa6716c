"""Keeps requests flowing through a Service and counts what goes wrong. Runs inside a pod, from standard input.

`python - URL MODEL SECONDS CONCURRENCY` prints one JSON object: requests, failures, and the first few errors.
"""

import asyncio
import json
import sys
import time

import openai
from openai.types.chat import ChatCompletionMessageParam

MAX_ERRORS = 5
QUESTION = "What is a pod?"


async def keep_asking(
    client: openai.AsyncOpenAI, model: str, until: float, result: dict[str, list[str]]
) -> None:
    """Ask one question after the other, each over a new connection, half of them streamed."""
    while time.monotonic() < until:
        try:
            result["answers"].append(await ask(client, model, stream=len(result["answers"]) % 2 == 0))
        except openai.OpenAIError as error:
            result["errors"].append(f"{type(error).__name__}: {error}")


async def ask(client: openai.AsyncOpenAI, model: str, *, stream: bool) -> str:
    """One answer, greedy, so that all are the same."""
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": QUESTION}]
    create = client.chat.completions.create
    if not stream:
        whole = await create(model=model, messages=messages, temperature=0, max_tokens=24)
        return whole.choices[0].message.content or ""
    chunks = await create(model=model, messages=messages, temperature=0, max_tokens=24, stream=True)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks if chunk.choices])


async def main(url: str, model: str, seconds: float, concurrency: int) -> None:
    """Run the traffic and print what came of it."""
    result: dict[str, list[str]] = {"answers": [], "errors": []}
    until = time.monotonic() + seconds
    clients = [
        openai.AsyncOpenAI(
            base_url=url, api_key="none", max_retries=0, timeout=60, default_headers={"Connection": "close"}
        )
        for _ in range(concurrency)
    ]
    await asyncio.gather(*(keep_asking(client, model, until, result) for client in clients))
    print(
        json.dumps(
            {
                "requests": len(result["answers"]) + len(result["errors"]),
                "failed": len(result["errors"]),
                "errors": result["errors"][:MAX_ERRORS],
                "distinct_answers": sorted(set(result["answers"]))[:MAX_ERRORS],
            }
        )
    )


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4])))
