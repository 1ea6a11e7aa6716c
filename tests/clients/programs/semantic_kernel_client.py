import asyncio

import scenarios as skiff
from openai import AsyncOpenAI
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAITextEmbedding
from semantic_kernel.functions import kernel_function

asked: list[str] = []


class Weather:
    @kernel_function
    def get_weather(self, city: str) -> str:
        """Return the weather of a city."""
        asked.append(city)
        return skiff.WEATHER


def service(url: str, name: str) -> OpenAIChatCompletion:
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key=skiff.API_KEY)
    return OpenAIChatCompletion(ai_model_id=name, async_client=client)


def chat() -> None:
    agent = ChatCompletionAgent(
        service=service(skiff.DEMO_URL, skiff.DEMO), name="Guide", instructions="Be kind."
    )
    answer = asyncio.run(agent.get_response(messages=skiff.QUESTION))
    skiff.check(skiff.ANSWER in str(answer), answer)


def stream() -> None:
    async def read() -> list[str]:
        agent = ChatCompletionAgent(service=service(skiff.DEMO_URL, skiff.DEMO), name="Guide")
        return [str(part.message) async for part in agent.invoke_stream(messages=skiff.QUESTION)]

    parts = asyncio.run(read())
    skiff.check(len(parts) > 3 and skiff.ANSWER in "".join(parts), parts)


def call_tool() -> None:
    agent = ChatCompletionAgent(
        service=service(skiff.TOOLS_URL, skiff.TOOLS), name="Forecaster", plugins=[Weather()]
    )
    answer = asyncio.run(agent.get_response(messages="What does the weather plugin say?"))
    skiff.check(str(answer) == skiff.WEATHER_ANSWER and asked == ["Paris"], answer)


def embeddings() -> None:
    client = AsyncOpenAI(base_url=f"{skiff.DEMO_URL}/v1", api_key=skiff.API_KEY)
    embedding = OpenAITextEmbedding(ai_model_id=skiff.DEMO, async_client=client)
    vectors = asyncio.run(embedding.generate_embeddings([skiff.QUESTION, "A service has an address."]))
    skiff.check(len(vectors) == 2 and len(vectors[0]) > 0, vectors)


skiff.run_scenarios(chat, stream, call_tool, embeddings)
