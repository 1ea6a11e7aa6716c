from langchain.agents import create_agent
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel
from scenarios import (
    ANSWER,
    API_KEY,
    DEMO,
    DEMO_URL,
    QUESTION,
    TOOLS,
    TOOLS_URL,
    WEATHER,
    WEATHER_ANSWER,
    WEATHER_QUESTION,
    check,
    run_scenarios,
)

demo = ChatOpenAI(base_url=f"{DEMO_URL}/v1", api_key=API_KEY, model=DEMO)
asked: list[str] = []


class Verdict(BaseModel):
    """The verdict."""

    certain: bool


def get_weather(city: str) -> str:
    """Return the weather of a city."""
    asked.append(city)
    return WEATHER


def chat() -> None:
    answer = demo.invoke(QUESTION)
    check(ANSWER in answer.content and answer.usage_metadata["output_tokens"] > 0, answer)


def stream() -> None:
    chunks = [chunk.text for chunk in demo.stream(QUESTION)]
    check(len(chunks) > 3 and ANSWER in "".join(chunks), chunks)


def structured_output() -> None:
    answer = demo.with_structured_output(Verdict).invoke(QUESTION)
    check(isinstance(answer, Verdict), answer)


def reasoning_effort() -> None:
    answer = demo.bind(reasoning_effort="low", verbosity="low").invoke(QUESTION)
    check(ANSWER in answer.content, answer)


def agent() -> None:
    model = ChatOpenAI(base_url=f"{TOOLS_URL}/v1", api_key=API_KEY, model=TOOLS)
    made = create_agent(model, tools=[get_weather], name="forecaster")
    answer = made.invoke({"messages": [{"role": "user", "content": WEATHER_QUESTION, "name": "ada"}]})
    check(answer["messages"][-1].text == WEATHER_ANSWER and asked == ["Paris"], answer)


def responses_agent() -> None:
    asked.clear()
    model = ChatOpenAI(base_url=f"{TOOLS_URL}/v1", api_key=API_KEY, model=TOOLS, use_responses_api=True)
    answer = create_agent(model, tools=[get_weather]).invoke({"messages": [("user", WEATHER_QUESTION)]})
    check(answer["messages"][-1].text == WEATHER_ANSWER and asked == ["Paris"], answer)


def embeddings() -> None:
    model = OpenAIEmbeddings(
        base_url=f"{DEMO_URL}/v1", api_key=API_KEY, model=DEMO, check_embedding_ctx_length=False
    )
    vectors = model.embed_documents([QUESTION, "A service has an address."])
    check(len(vectors) == 2 and len(vectors[0]) == len(model.embed_query(QUESTION)), vectors)


run_scenarios(chat, stream, structured_output, reasoning_effort, agent, responses_agent, embeddings)
