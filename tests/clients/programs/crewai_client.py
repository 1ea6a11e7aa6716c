import scenarios as skiff
from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool

asked: list[str] = []


@tool("get_weather")
def get_weather(city: str) -> str:
    """Return the weather of a city."""
    asked.append(city)
    return skiff.WEATHER


def chat() -> None:
    model = LLM(model=f"openai/{skiff.DEMO}", base_url=f"{skiff.DEMO_URL}/v1", api_key=skiff.API_KEY)
    answer = model.call(skiff.QUESTION)
    skiff.check(skiff.ANSWER in answer, answer)


def stream() -> None:
    model = LLM(
        model=f"openai/{skiff.DEMO}", base_url=f"{skiff.DEMO_URL}/v1", api_key=skiff.API_KEY, stream=True
    )
    answer = model.call(skiff.QUESTION)
    skiff.check(skiff.ANSWER in answer, answer)


def crew() -> None:
    model = LLM(model=f"openai/{skiff.TOOLS}", base_url=f"{skiff.TOOLS_URL}/v1", api_key=skiff.API_KEY)
    agent = Agent(
        role="Forecaster", goal="Forecast", backstory="Knows clouds.", llm=model, tools=[get_weather]
    )
    task = Task(description=skiff.WEATHER_QUESTION, expected_output="A sentence.", agent=agent)
    answer = Crew(agents=[agent], tasks=[task]).kickoff()
    skiff.check(answer.raw == skiff.WEATHER_ANSWER and asked == ["Paris"], answer)


skiff.run_scenarios(chat, stream, crew)
