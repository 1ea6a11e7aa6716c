from pathlib import Path

import scenarios as skiff

CONFIG = f"""
model = "{skiff.TOOLS}"
model_provider = "skiff"

[model_providers.skiff]
name = "Skiff"
base_url = "{skiff.TOOLS_URL}/v1"
wire_api = "responses"
"""


def codex(prompt: str) -> str:
    folder = Path.home() / ".codex"
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").write_text(CONFIG)
    # The sandbox needs user namespaces, which a container may not have; the model's only command is an echo.
    return skiff.run_command(
        ["codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", prompt]
    )


def chat() -> None:
    printed = codex(skiff.QUESTION)
    skiff.check("A pod is the smallest unit" in printed, printed)


def call_tool() -> None:
    printed = codex("Let Codex add up.")
    skiff.check("The shell says 42." in printed, printed)


skiff.run_scenarios(chat, call_tool)
