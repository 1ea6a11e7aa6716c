"""``skiff chat``, a chat with a served model in the terminal: the HTTP client, the conversation, and the user interface."""

from skiff_runtime.shell.command import add_arguments, run

__all__ = ["add_arguments", "run"]
