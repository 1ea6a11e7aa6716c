import asyncio

import scenarios as skiff
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_default_openai_client,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from openai.types.responses import ResponseTextDeltaEvent

set_tracing_disabled(True)
asked: list[str] = []


@function_tool
def get_weather(city: str) -> str:
    """Return the weather of a city."""
    asked.append(city)
    return skiff.WEATHER


def client(url: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{url}/v1", api_key=skiff.API_KEY)


def chat() -> None:
    set_default_openai_client(client(skiff.DEMO_URL))
    answer = Runner.run_sync(Agent(name="Guide", model=skiff.DEMO), skiff.QUESTION)
    skiff.check(skiff.ANSWER in answer.final_output, answer)


def stream() -> None:
    async def read() -> list[str]:
        set_default_openai_client(client(skiff.DEMO_URL))
        answer = Runner.run_streamed(Agent(name="Guide", model=skiff.DEMO), skiff.QUESTION)
        return [
            event.data.delta
            async for event in answer.stream_events()
            if event.type == "raw_response_event" and isinstance(event.data, ResponseTextDeltaEvent)
        ]

    deltas = asyncio.run(read())
    skiff.check(len(deltas) > 3 and skiff.ANSWER in "".join(deltas), deltas)


def call_tool() -> None:
    set_default_openai_client(client(skiff.TOOLS_URL))
    agent = Agent(name="Forecaster", instructions="Be kind.", model=skiff.TOOLS, tools=[get_weather])
    answer = Runner.run_sync(agent, skiff.WEATHER_QUESTION)
    skiff.check(answer.final_output == skiff.WEATHER_ANSWER and asked == ["Paris"], answer)


def chat_completions_tool() -> None:
    asked.clear()
    model = OpenAIChatCompletionsModel(skiff.TOOLS, client(skiff.TOOLS_URL))
    settings = ModelSettings(store=True, metadata={"team": "weather"})
    agent = Agent(name="Forecaster", model=model, tools=[get_weather], model_settings=settings)
    answer = Runner.run_sync(agent, skiff.WEATHER_QUESTION)
    skiff.check(answer.final_output == skiff.WEATHER_ANSWER and asked == ["Paris"], answer)


skiff.run_scenarios(chat, stream, call_tool, chat_completions_tool)
