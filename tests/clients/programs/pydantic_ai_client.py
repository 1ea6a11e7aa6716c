import asyncio

import scenarios as skiff
from pydantic import BaseModel
from pydantic_ai import Agent, Embedder
from pydantic_ai.embeddings.openai import OpenAIEmbeddingModel
from pydantic_ai.models import Model
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

asked: list[str] = []


def provider(url: str) -> OpenAIProvider:
    # One for each scenario: its connections belong to the event loop that opened them, and loops end.
    return OpenAIProvider(base_url=f"{url}/v1", api_key=skiff.API_KEY)


class Verdict(BaseModel):
    certain: bool


def get_weather(city: str) -> str:
    """Return the weather of a city."""
    asked.append(city)
    return skiff.WEATHER


def ask(model: Model) -> None:
    asked.clear()
    answer = Agent(model, tools=[get_weather], instructions="Be kind.").run_sync(skiff.WEATHER_QUESTION)
    skiff.check(answer.output == skiff.WEATHER_ANSWER and asked == ["Paris"], answer)


async def read_stream(model: Model) -> list[str]:
    async with Agent(model).run_stream(skiff.QUESTION) as answer:
        return [delta async for delta in answer.stream_text(delta=True, debounce_by=None)]


def chat() -> None:
    answer = Agent(OpenAIChatModel(skiff.DEMO, provider=provider(skiff.DEMO_URL))).run_sync(skiff.QUESTION)
    skiff.check(skiff.ANSWER in answer.output, answer)


def stream() -> None:
    deltas = asyncio.run(read_stream(OpenAIChatModel(skiff.DEMO, provider=provider(skiff.DEMO_URL))))
    skiff.check(len(deltas) > 3 and skiff.ANSWER in "".join(deltas), deltas)


def chat_tool() -> None:
    ask(OpenAIChatModel(skiff.TOOLS, provider=provider(skiff.TOOLS_URL)))


def output_type() -> None:
    answer = Agent(
        OpenAIChatModel(skiff.TOOLS, provider=provider(skiff.TOOLS_URL)), output_type=Verdict
    ).run_sync(skiff.QUESTION)
    skiff.check(isinstance(answer.output, Verdict), answer)


def responses() -> None:
    answer = Agent(OpenAIResponsesModel(skiff.DEMO, provider=provider(skiff.DEMO_URL))).run_sync(
        skiff.QUESTION
    )
    skiff.check(skiff.ANSWER in answer.output, answer)


def responses_stream() -> None:
    deltas = asyncio.run(read_stream(OpenAIResponsesModel(skiff.DEMO, provider=provider(skiff.DEMO_URL))))
    skiff.check(len(deltas) > 3 and skiff.ANSWER in "".join(deltas), deltas)


def responses_tool() -> None:
    ask(OpenAIResponsesModel(skiff.TOOLS, provider=provider(skiff.TOOLS_URL)))


def embeddings() -> None:
    embedder = Embedder(OpenAIEmbeddingModel(skiff.DEMO, provider=provider(skiff.DEMO_URL)))
    answer = embedder.embed_documents_sync([skiff.QUESTION, "A service has an address."])
    skiff.check(len(answer.embeddings) == 2 and len(answer.embeddings[0]) > 0, answer)


skiff.run_scenarios(
    chat, stream, chat_tool, output_type, responses, responses_stream, responses_tool, embeddings
)
