from anthropic import Anthropic, beta_tool
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

demo = Anthropic(base_url=DEMO_URL, api_key=API_KEY)
tools = Anthropic(base_url=TOOLS_URL, api_key=API_KEY)
MESSAGES = [{"role": "user", "content": QUESTION}]
asked: list[str] = []


@beta_tool
def get_weather(city: str) -> str:
    """Return the weather of a city.

    Args:
        city: The city's name.
    """
    asked.append(city)
    return WEATHER


def chat() -> None:
    answer = demo.messages.create(model=DEMO, max_tokens=200, messages=MESSAGES, system="Be kind.")
    check(ANSWER in answer.content[0].text and answer.stop_reason == "end_turn", answer)


def stream() -> None:
    with demo.messages.stream(model=DEMO, max_tokens=200, messages=MESSAGES) as events:
        chunks = list(events.text_stream)
        answer = events.get_final_message()
    check(len(chunks) > 3 and ANSWER in "".join(chunks), chunks)
    check(answer.usage.output_tokens > 3, answer)


def count_tokens() -> None:
    counted = demo.messages.count_tokens(model=DEMO, messages=MESSAGES)
    used = demo.messages.create(model=DEMO, max_tokens=1, messages=MESSAGES).usage.input_tokens
    check(counted.input_tokens == used > 0, (counted, used))


def call_tool() -> None:
    weather = {
        "name": "get_weather",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    }
    messages = [{"role": "user", "content": WEATHER_QUESTION}]
    with tools.messages.stream(model=TOOLS, max_tokens=200, messages=messages, tools=[weather]) as events:
        first = events.get_final_message()
    [call] = [block for block in first.content if block.type == "tool_use"]
    check(call.input == {"city": "Paris"} and first.stop_reason == "tool_use", first)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": WEATHER}
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    last = tools.messages.create(model=TOOLS, max_tokens=200, messages=messages, tools=[weather])
    check(last.content[0].text == WEATHER_ANSWER, last)


def tool_runner() -> None:
    runner = tools.beta.messages.tool_runner(
        model=TOOLS,
        max_tokens=200,
        messages=[{"role": "user", "content": WEATHER_QUESTION}],
        tools=[get_weather],
    )
    answer = runner.until_done()
    check(answer.content[0].text == WEATHER_ANSWER and asked == ["Paris"], answer)


run_scenarios(chat, stream, count_tokens, call_tool, tool_runner)
