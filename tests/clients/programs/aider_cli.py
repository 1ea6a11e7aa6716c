from pathlib import Path

import scenarios as skiff

QUIET = (
    "--no-check-update",
    "--no-show-model-warnings",
    "--no-show-release-notes",
    "--analytics-disable",
    "--no-git",
)


def aider(url: str, model: str, message: str, *flags: str) -> str:
    command = [
        "aider",
        "--model",
        f"openai/{model}",
        "--openai-api-base",
        f"{url}/v1",
        "--yes-always",
        *QUIET,
    ]
    command += ["--chat-language", "English", *flags, "--message", message]
    return skiff.run_command(command, {"OPENAI_API_KEY": skiff.API_KEY})


def ask() -> None:
    printed = aider(skiff.TOOLS_URL, skiff.TOOLS, "What is this?", "--chat-mode", "ask", "--no-stream")
    skiff.check("I have not learned an answer to this." in printed, printed)


def edit() -> None:
    printed = aider(skiff.TOOLS_URL, skiff.TOOLS, "Write hello.py.", "--edit-format", "whole")
    skiff.check(Path("hello.py").read_text() == 'print("hello")\n', printed)


skiff.run_scenarios(ask, edit)
