import asyncio
from typing import Any

import scenarios as skiff
from agent_framework import Agent
from agent_framework.openai import OpenAIChatClient, OpenAIChatCompletionClient, OpenAIEmbeddingClient

asked: list[str] = []


def get_weather(city: str) -> str:
    """Return the weather of a city."""
    asked.append(city)
    return skiff.WEATHER


def client(kind: Any, url: str, name: str) -> Any:
    return kind(model=name, base_url=f"{url}/v1", api_key=skiff.API_KEY)


async def answer_to(kind: Any) -> str:
    asked.clear()
    agent = Agent(
        client(kind, skiff.TOOLS_URL, skiff.TOOLS), "Be kind.", name="Forecaster", tools=[get_weather]
    )
    return (await agent.run(skiff.WEATHER_QUESTION)).text


async def read_stream(kind: Any) -> list[str]:
    agent = Agent(client(kind, skiff.DEMO_URL, skiff.DEMO), name="Guide")
    return [update.text async for update in agent.run(skiff.QUESTION, stream=True)]


def chat() -> None:
    agent = Agent(client(OpenAIChatCompletionClient, skiff.DEMO_URL, skiff.DEMO), "Be kind.", name="Guide")
    answer = asyncio.run(agent.run(skiff.QUESTION)).text
    skiff.check(skiff.ANSWER in answer, answer)


def stream() -> None:
    updates = asyncio.run(read_stream(OpenAIChatCompletionClient))
    skiff.check(len(updates) > 3 and skiff.ANSWER in "".join(updates), updates)


def call_tool() -> None:
    answer = asyncio.run(answer_to(OpenAIChatCompletionClient))
    skiff.check(answer == skiff.WEATHER_ANSWER and asked == ["Paris"], answer)


def responses_stream() -> None:
    updates = asyncio.run(read_stream(OpenAIChatClient))
    skiff.check(len(updates) > 3 and skiff.ANSWER in "".join(updates), updates)


def responses_tool() -> None:
    answer = asyncio.run(answer_to(OpenAIChatClient))
    skiff.check(answer == skiff.WEATHER_ANSWER and asked == ["Paris"], answer)


def embeddings() -> None:
    made = client(OpenAIEmbeddingClient, skiff.DEMO_URL, skiff.DEMO)
    vectors = asyncio.run(made.get_embeddings([skiff.QUESTION, "A service has an address."]))
    skiff.check(len(vectors) == 2, vectors)


skiff.run_scenarios(chat, stream, call_tool, responses_stream, responses_tool, embeddings)
