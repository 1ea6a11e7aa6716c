import json
from pathlib import Path

import scenarios as skiff

CONFIG = {
    "$schema": "https://opencode.ai/config.json",
    "autoupdate": False,
    "provider": {
        "skiff": {
            "npm": "@ai-sdk/openai-compatible",
            "name": "Skiff",
            "options": {"baseURL": f"{skiff.TOOLS_URL}/v1"},
            "models": {skiff.TOOLS: {"limit": {"context": 131072, "output": 4096}}},
        }
    },
}
ENVIRONMENT = {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"}


def opencode(prompt: str) -> str:
    Path("opencode.json").write_text(json.dumps(CONFIG))
    return skiff.run_command(["opencode", "run", "-m", f"skiff/{skiff.TOOLS}", prompt], ENVIRONMENT)


def chat() -> None:
    printed = opencode(skiff.QUESTION)
    skiff.check("A pod is the smallest unit" in printed, printed)


def call_tool() -> None:
    printed = opencode("Add up in opencode.")
    skiff.check("The shell says 42." in printed, printed)


skiff.run_scenarios(chat, call_tool)
