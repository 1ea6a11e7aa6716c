"""Talk to a served model in the terminal.

Here belongs ``skiff chat``: the HTTP client, the conversation, and the terminal around them.
"""

from skiff_runtime.shell.command import add_arguments, run

__all__ = ["add_arguments", "run"]
