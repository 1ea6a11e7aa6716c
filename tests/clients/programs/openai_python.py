import json

from openai import OpenAI
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

demo = OpenAI(base_url=f"{DEMO_URL}/v1", api_key=API_KEY)
tools = OpenAI(base_url=f"{TOOLS_URL}/v1", api_key=API_KEY)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


class Verdict(BaseModel):
    certain: bool


def models() -> None:
    check([model.id for model in demo.models.list()] == [DEMO], "other models")


def chat() -> None:
    answer = demo.chat.completions.create(model=DEMO, messages=[{"role": "user", "content": QUESTION}])
    check(ANSWER in answer.choices[0].message.content, answer)


def stream() -> None:
    with demo.chat.completions.stream(model=DEMO, messages=[{"role": "user", "content": QUESTION}]) as events:
        kinds = {event.type for event in events}
        answer = events.get_final_completion()
    check({"content.delta", "content.done"} <= kinds, kinds)
    check(ANSWER in answer.choices[0].message.content, answer)


def completions() -> None:
    answer = demo.completions.create(model=DEMO, prompt="A pod is", max_tokens=8, logprobs=2, temperature=0)
    check(len(answer.choices[0].logprobs.tokens) == 8, answer)


def parse() -> None:
    answer = demo.chat.completions.parse(
        model=DEMO, messages=[{"role": "user", "content": QUESTION}], response_format=Verdict
    )
    check(isinstance(answer.choices[0].message.parsed, Verdict), answer)


def call_tool() -> None:
    messages = [{"role": "user", "content": WEATHER_QUESTION}]
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
    with tools.chat.completions.stream(model=TOOLS, messages=messages, tools=[tool]) as events:
        first = events.get_final_completion().choices[0].message
    [call] = first.tool_calls
    check(json.loads(call.function.arguments) == {"city": "Paris"}, call)
    messages += [first.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": WEATHER}]
    last = tools.chat.completions.create(model=TOOLS, messages=messages, tools=[tool])
    check(last.choices[0].message.content == WEATHER_ANSWER, last)


def forced_tool() -> None:
    tool = {"type": "function", "function": {"name": "book", "parameters": Verdict.model_json_schema()}}
    answer = tools.chat.completions.create(
        model=TOOLS, messages=[{"role": "user", "content": QUESTION}], tools=[tool], tool_choice="required"
    )
    [call] = answer.choices[0].message.tool_calls
    Verdict.model_validate_json(call.function.arguments)


def responses() -> None:
    with demo.responses.stream(model=DEMO, input=QUESTION) as events:
        kinds = {event.type for event in events}
        answer = events.get_final_response()
    check({"response.created", "response.output_text.delta", "response.completed"} <= kinds, kinds)
    check(ANSWER in answer.output_text, answer)
    more = demo.responses.create(model=DEMO, input="Tell me more.", previous_response_id=answer.id)
    check(more.output_text, more)


def responses_tool() -> None:
    tool = {"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": False}
    first = tools.responses.create(model=TOOLS, input=WEATHER_QUESTION, tools=[tool])
    [call] = [item for item in first.output if item.type == "function_call"]
    check(json.loads(call.arguments) == {"city": "Paris"}, call)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": WEATHER}
    last = tools.responses.create(model=TOOLS, input=[result], previous_response_id=first.id, tools=[tool])
    check(last.output_text == WEATHER_ANSWER, last)


def embeddings() -> None:
    answer = demo.embeddings.create(model=DEMO, input=[QUESTION, "A service has an address."])
    check(
        len(answer.data) == 2 and len(answer.data[0].embedding) == len(answer.data[1].embedding) > 0, answer
    )


run_scenarios(
    models, chat, stream, completions, parse, call_tool, forced_tool, responses, responses_tool, embeddings
)
