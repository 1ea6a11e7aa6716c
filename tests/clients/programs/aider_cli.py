from pathlib import Path

import scenarios as skiff

QUIET = (
    "--no-check-update",
    "--no-show-model-warnings",
    "--no-show-release-notes",
    "--analytics-disable",
    "--no-git",
)


def aider(message: str, *flags: str) -> str:
    command = [
        "aider",
        "--model",
        f"openai/{skiff.TOOLS}",
        "--openai-api-base",
        f"{skiff.TOOLS_URL}/v1",
        "--yes-always",
        *QUIET,
    ]
    command += ["--chat-language", "English", *flags, "--message", message]
    return skiff.run_command(command, {"OPENAI_API_KEY": skiff.API_KEY})


def ask() -> None:
    printed = aider("Show hello.py.", "--chat-mode", "ask", "--no-stream")
    skiff.check('print("hello")' in printed and not Path("hello.py").exists(), printed)


def edit() -> None:
    printed = aider("Write hello.py.", "--edit-format", "whole")
    skiff.check(Path("hello.py").read_text() == 'print("hello")\n', printed)


skiff.run_scenarios(ask, edit)
