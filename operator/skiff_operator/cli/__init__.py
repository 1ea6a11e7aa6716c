"""The user's commands: `kubectl skiff COMMAND`, and `skiff COMMAND` where the operator extra is installed.

`main` registers a command by its file; each file has `add_arguments(parser)` and `run(arguments)`, and its docstring is
the description in --help. The commands act with the user's own credentials and need no access to the operator.
"""
