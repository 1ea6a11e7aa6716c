import json

import litellm
import scenarios as skiff

MESSAGES = [{"role": "user", "content": skiff.QUESTION}]
DEMO = {"model": f"openai/{skiff.DEMO}", "api_base": f"{skiff.DEMO_URL}/v1", "api_key": skiff.API_KEY}
TOOLS = {"model": f"openai/{skiff.TOOLS}", "api_base": f"{skiff.TOOLS_URL}/v1", "api_key": skiff.API_KEY}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def chat() -> None:
    answer = litellm.completion(messages=MESSAGES, **DEMO)
    skiff.check(skiff.ANSWER in answer.choices[0].message.content, answer)


def vllm_provider() -> None:
    answer = litellm.completion(messages=MESSAGES, **{**DEMO, "model": f"hosted_vllm/{skiff.DEMO}"})
    skiff.check(skiff.ANSWER in answer.choices[0].message.content, answer)


def stream() -> None:
    chunks = list(litellm.completion(messages=MESSAGES, stream=True, **DEMO))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    skiff.check(len(chunks) > 3 and skiff.ANSWER in text, chunks)


def answer_sent_back() -> None:
    answer = litellm.completion(messages=MESSAGES, **DEMO)
    messages = [
        *MESSAGES,
        answer.choices[0].message.model_dump(),
        {"role": "user", "content": "Tell me more."},
    ]
    skiff.check(litellm.completion(messages=messages, **DEMO).choices[0].message.content, answer)


def reasoning_effort() -> None:
    answer = litellm.completion(
        messages=MESSAGES, reasoning_effort="low", allowed_openai_params=["reasoning_effort"], **DEMO
    )
    skiff.check(skiff.ANSWER in answer.choices[0].message.content, answer)


def call_tool() -> None:
    messages = [{"role": "user", "content": skiff.WEATHER_QUESTION}]
    chunks = list(litellm.completion(messages=messages, tools=[WEATHER], stream=True, **TOOLS))
    first = litellm.stream_chunk_builder(chunks, messages=messages).choices[0].message
    [call] = first.tool_calls
    skiff.check(json.loads(call.function.arguments) == {"city": "Paris"}, call)
    messages += [first.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": skiff.WEATHER}]
    last = litellm.completion(messages=messages, tools=[WEATHER], **TOOLS)
    skiff.check(last.choices[0].message.content == skiff.WEATHER_ANSWER, last)


def responses() -> None:
    answer = litellm.responses(input=skiff.QUESTION, **DEMO)
    skiff.check(skiff.ANSWER in answer.output_text, answer)


def messages() -> None:
    answer = litellm.completion(
        model=f"anthropic/{skiff.DEMO}", messages=MESSAGES, api_base=skiff.DEMO_URL, api_key=skiff.API_KEY
    )
    skiff.check(skiff.ANSWER in answer.choices[0].message.content, answer)


def embeddings() -> None:
    answer = litellm.embedding(input=[skiff.QUESTION, "A service has an address."], **DEMO)
    skiff.check(len(answer.data) == 2 and len(answer.data[0]["embedding"]) > 0, answer)


def rerank() -> None:
    documents = ["A pod runs containers.", "The weather is fine."]
    answer = litellm.rerank(
        model=f"hosted_vllm/{skiff.DEMO}",
        query=skiff.QUESTION,
        documents=documents,
        top_n=1,
        api_base=skiff.DEMO_URL,
        api_key=skiff.API_KEY,
    )
    skiff.check(len(answer.results) == 1 and 0 <= answer.results[0]["relevance_score"] <= 1, answer)


skiff.run_scenarios(
    chat,
    vllm_provider,
    stream,
    answer_sent_back,
    reasoning_effort,
    call_tool,
    responses,
    messages,
    embeddings,
    rerank,
)
