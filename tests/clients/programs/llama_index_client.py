import asyncio

import scenarios as skiff
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

demo = OpenAILike(
    api_base=f"{skiff.DEMO_URL}/v1",
    api_key=skiff.API_KEY,
    model=skiff.DEMO,
    is_chat_model=True,
    context_window=2048,
)
tools = OpenAILike(
    api_base=f"{skiff.TOOLS_URL}/v1",
    api_key=skiff.API_KEY,
    model=skiff.TOOLS,
    is_chat_model=True,
    is_function_calling_model=True,
    context_window=131072,
)
asked: list[str] = []


class Verdict(BaseModel):
    certain: bool


def get_weather(city: str) -> str:
    """Return the weather of a city."""
    asked.append(city)
    return skiff.WEATHER


def chat() -> None:
    answer = demo.chat([ChatMessage(role="user", content=skiff.QUESTION)])
    skiff.check(skiff.ANSWER in answer.message.content, answer)


def stream() -> None:
    chunks = [chunk.delta for chunk in demo.stream_chat([ChatMessage(role="user", content=skiff.QUESTION)])]
    skiff.check(len(chunks) > 3 and skiff.ANSWER in "".join(chunks), chunks)


def complete() -> None:
    model = OpenAILike(api_base=f"{skiff.DEMO_URL}/v1", api_key=skiff.API_KEY, model=skiff.DEMO, max_tokens=8)
    skiff.check(model.complete("A pod is").text, "no text")


def structured_output() -> None:
    answer = tools.as_structured_llm(Verdict).complete(skiff.QUESTION)
    skiff.check(isinstance(answer.raw, Verdict), answer)


def agent() -> None:
    async def ask() -> str:
        made = FunctionAgent(tools=[get_weather], llm=tools, system_prompt="Be kind.")
        return str(await made.run(skiff.WEATHER_QUESTION))

    answer = asyncio.run(ask())
    skiff.check(answer == skiff.WEATHER_ANSWER and asked == ["Paris"], answer)


def embeddings() -> None:
    model = OpenAILikeEmbedding(api_base=f"{skiff.DEMO_URL}/v1", api_key=skiff.API_KEY, model_name=skiff.DEMO)
    vectors = model.get_text_embedding_batch([skiff.QUESTION, "A service has an address."])
    skiff.check(len(vectors) == 2 and len(vectors[0]) == len(model.get_query_embedding("A pod")), vectors)


skiff.run_scenarios(chat, stream, complete, structured_output, agent, embeddings)
