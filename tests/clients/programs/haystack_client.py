import scenarios as skiff
from haystack.components.agents import Agent
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage, Document
from haystack.tools import tool
from haystack.utils import Secret

KEY = Secret.from_token(skiff.API_KEY)
asked: list[str] = []


@tool
def get_weather(city: str) -> str:
    """Return the weather of a city."""
    asked.append(city)
    return skiff.WEATHER


def chat() -> None:
    model = OpenAIChatGenerator(api_key=KEY, model=skiff.DEMO, api_base_url=f"{skiff.DEMO_URL}/v1")
    answer = model.run([ChatMessage.from_user(skiff.QUESTION, name="ada")])["replies"][0]
    skiff.check(skiff.ANSWER in answer.text, answer)


def stream() -> None:
    chunks: list[str] = []
    model = OpenAIChatGenerator(
        api_key=KEY,
        model=skiff.DEMO,
        api_base_url=f"{skiff.DEMO_URL}/v1",
        streaming_callback=lambda chunk: chunks.append(chunk.content),
    )
    model.run([ChatMessage.from_user(skiff.QUESTION)])
    skiff.check(len(chunks) > 3 and skiff.ANSWER in "".join(chunks), chunks)


def agent() -> None:
    model = OpenAIChatGenerator(api_key=KEY, model=skiff.TOOLS, api_base_url=f"{skiff.TOOLS_URL}/v1")
    made = Agent(chat_generator=model, tools=[get_weather], system_prompt="Be kind.")
    answer = made.run(messages=[ChatMessage.from_user(skiff.WEATHER_QUESTION)])["last_message"]
    skiff.check(answer.text == skiff.WEATHER_ANSWER and asked == ["Paris"], answer)


def embeddings() -> None:
    settings = {"api_key": KEY, "model": skiff.DEMO, "api_base_url": f"{skiff.DEMO_URL}/v1"}
    query = OpenAITextEmbedder(**settings).run(skiff.QUESTION)["embedding"]
    documents = OpenAIDocumentEmbedder(**settings).run([Document(content="A pod runs containers.")])[
        "documents"
    ]
    skiff.check(len(query) == len(documents[0].embedding) > 0, documents)


skiff.run_scenarios(chat, stream, agent, embeddings)
