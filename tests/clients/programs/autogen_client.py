import asyncio

import scenarios as skiff
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.messages import ModelClientStreamingChunkEvent
from autogen_ext.models.openai import OpenAIChatCompletionClient

INFO = {
    "vision": False,
    "function_calling": True,
    "json_output": True,
    "family": "unknown",
    "structured_output": True,
}
asked: list[str] = []


async def get_weather(city: str) -> str:
    """Return the weather of a city."""
    asked.append(city)
    return skiff.WEATHER


def model(url: str, name: str) -> OpenAIChatCompletionClient:
    return OpenAIChatCompletionClient(
        model=name, base_url=f"{url}/v1", api_key=skiff.API_KEY, model_info=INFO
    )


def chat() -> None:
    agent = AssistantAgent("guide", model(skiff.DEMO_URL, skiff.DEMO), system_message="Be kind.")
    answer = asyncio.run(agent.run(task=skiff.QUESTION))
    skiff.check(skiff.ANSWER in answer.messages[-1].content, answer)


def stream() -> None:
    async def read() -> list[str]:
        agent = AssistantAgent("guide", model(skiff.DEMO_URL, skiff.DEMO), model_client_stream=True)
        events = agent.run_stream(task=skiff.QUESTION)
        return [event.content async for event in events if isinstance(event, ModelClientStreamingChunkEvent)]

    chunks = asyncio.run(read())
    skiff.check(len(chunks) > 3 and skiff.ANSWER in "".join(chunks), chunks)


def call_tool() -> None:
    agent = AssistantAgent(
        "forecaster", model(skiff.TOOLS_URL, skiff.TOOLS), tools=[get_weather], reflect_on_tool_use=True
    )
    answer = asyncio.run(agent.run(task=skiff.WEATHER_QUESTION))
    skiff.check(answer.messages[-1].content == skiff.WEATHER_ANSWER and asked == ["Paris"], answer)


skiff.run_scenarios(chat, stream, call_tool)
