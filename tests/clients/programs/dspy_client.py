import dspy
import scenarios as skiff

demo = dspy.LM(
    f"openai/{skiff.DEMO}",
    api_base=f"{skiff.DEMO_URL}/v1",
    api_key=skiff.API_KEY,
    cache=False,
    max_tokens=200,
)
tools = dspy.LM(
    f"openai/{skiff.TOOLS}",
    api_base=f"{skiff.TOOLS_URL}/v1",
    api_key=skiff.API_KEY,
    cache=False,
    max_tokens=200,
)
asked: list[str] = []


def get_weather(city: str) -> str:
    """Return the weather of a city."""
    asked.append(city)
    return skiff.WEATHER


def chat() -> None:
    [answer] = demo(skiff.QUESTION)
    skiff.check(skiff.ANSWER in str(answer), answer)


def structured_output() -> None:
    with dspy.context(lm=tools, adapter=dspy.JSONAdapter()):
        answer = dspy.Predict("question -> certain: bool")(question=skiff.QUESTION)
    skiff.check(isinstance(answer.certain, bool), answer)


def react() -> None:
    with dspy.context(lm=tools, adapter=dspy.ChatAdapter()):
        answer = dspy.ReAct("question -> answer", tools=[get_weather], max_iters=1)(
            question=skiff.WEATHER_QUESTION
        )
    skiff.check(answer.answer == skiff.WEATHER_ANSWER and asked == ["Paris"], answer)


def embeddings() -> None:
    embed = dspy.Embedder(
        f"openai/{skiff.DEMO}", api_base=f"{skiff.DEMO_URL}/v1", api_key=skiff.API_KEY, caching=False
    )
    vectors = embed([skiff.QUESTION, "A service has an address."])
    skiff.check(len(vectors) == 2 and len(vectors[0]) > 0, vectors)


skiff.run_scenarios(chat, structured_output, react, embeddings)
