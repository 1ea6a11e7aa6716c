import json

import scenarios as skiff

ENVIRONMENT = {
    "ANTHROPIC_BASE_URL": skiff.TOOLS_URL,
    "ANTHROPIC_AUTH_TOKEN": skiff.API_KEY,
    "ANTHROPIC_MODEL": skiff.TOOLS,
    "ANTHROPIC_SMALL_FAST_MODEL": skiff.TOOLS,
    "ANTHROPIC_DEFAULT_HAIKU_MODEL": skiff.TOOLS,
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
}


def claude(prompt: str, *flags: str) -> str:
    return skiff.run_command(["claude", "-p", prompt, *flags], ENVIRONMENT)


def chat() -> None:
    # With all of its tools, Claude Code writes lists of agents and skills after the prompt, where the model looks.
    printed = claude(skiff.QUESTION, "--tools", "Bash")
    skiff.check("A pod is the smallest unit" in printed, printed)


def call_tool() -> None:
    printed = claude("Add up.", "--allowedTools", "Bash")
    skiff.check("The shell says 42." in printed, printed)


def stream() -> None:
    flags = ("--tools", "Bash", "--output-format", "stream-json", "--verbose", "--include-partial-messages")
    printed = claude("Add up, Claude.", "--allowedTools", "Bash", *flags)
    events = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    kinds = {event["event"]["type"] for event in events if event["type"] == "stream_event"}
    skiff.check({"message_start", "content_block_delta", "message_stop"} <= kinds, printed)


skiff.run_scenarios(chat, call_tool, stream)
