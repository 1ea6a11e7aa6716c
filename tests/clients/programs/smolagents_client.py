import scenarios as skiff
from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool

asked: list[str] = []


@tool
def get_weather(city: str) -> str:
    """Return the weather of a city.

    Args:
        city: The city's name.
    """
    asked.append(city)
    return skiff.WEATHER


def model(url: str, name: str) -> OpenAIModel:
    return OpenAIModel(model_id=name, api_base=f"{url}/v1", api_key=skiff.API_KEY)


def chat() -> None:
    answer = model(skiff.DEMO_URL, skiff.DEMO)(
        [{"role": "user", "content": [{"type": "text", "text": skiff.QUESTION}]}]
    )
    skiff.check(skiff.ANSWER in answer.content, answer)


def stream() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": skiff.QUESTION}]}]
    chunks = [delta.content or "" for delta in model(skiff.DEMO_URL, skiff.DEMO).generate_stream(messages)]
    skiff.check(len(chunks) > 3 and skiff.ANSWER in "".join(chunks), chunks)


def tool_calling_agent() -> None:
    agent = ToolCallingAgent(tools=[get_weather], model=model(skiff.TOOLS_URL, skiff.TOOLS), max_steps=4)
    answer = agent.run(skiff.WEATHER_QUESTION)
    skiff.check(answer == skiff.WEATHER_ANSWER and asked == ["Paris"], answer)


def code_agent() -> None:
    agent = CodeAgent(tools=[], model=model(skiff.TOOLS_URL, skiff.TOOLS), max_steps=4)
    skiff.check(agent.run("Add up with Python.") == 42, agent.memory)


skiff.run_scenarios(chat, stream, tool_calling_agent, code_agent)
