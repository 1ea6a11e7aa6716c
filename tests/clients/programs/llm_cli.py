import json
from pathlib import Path

import scenarios as skiff

MODELS = f"""
- model_id: demo
  model_name: {skiff.DEMO}
  api_base: "{skiff.DEMO_URL}/v1"
- model_id: tools
  model_name: {skiff.TOOLS}
  api_base: "{skiff.TOOLS_URL}/v1"
  supports_tools: true
  supports_schema: true
"""
FUNCTION = f"""
def get_weather(city: str) -> str:
    "Return the weather of a city."
    return "{skiff.WEATHER}"
"""


def llm(*arguments: str) -> str:
    folder = Path.cwd() / "llm"
    folder.mkdir(exist_ok=True)
    (folder / "extra-openai-models.yaml").write_text(MODELS)
    return skiff.run_command(
        ["llm", *arguments], {"LLM_USER_PATH": str(folder), "OPENAI_API_KEY": skiff.API_KEY}
    )


def stream() -> None:
    printed = llm("-m", "demo", skiff.QUESTION)
    skiff.check(skiff.ANSWER in printed, printed)


def chat() -> None:
    printed = llm("-m", "demo", "--no-stream", skiff.QUESTION)
    skiff.check(skiff.ANSWER in printed, printed)


def schema() -> None:
    schema = {"type": "object", "properties": {"certain": {"type": "boolean"}}, "required": ["certain"]}
    printed = llm("-m", "tools", "--schema", json.dumps(schema), skiff.QUESTION)
    skiff.check(isinstance(json.loads(printed)["certain"], bool), printed)


def call_tool() -> None:
    printed = llm("-m", "tools", "--functions", FUNCTION, skiff.WEATHER_QUESTION)
    skiff.check(skiff.WEATHER_ANSWER in printed, printed)


skiff.run_scenarios(stream, chat, schema, call_tool)
