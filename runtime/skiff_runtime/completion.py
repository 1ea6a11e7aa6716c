"""Shell completion scripts of the ``skiff`` command, written by shtab from its argument parsers."""

import argparse
from pathlib import Path
from typing import Final

import shtab

from skiff_runtime.config.arguments import field_choices

_PATH_FIELDS: Final = frozenset(
    {
        "model",
        "chat_template",
        "download_dir",
        "lora_download_dir",
        "kernel_cache_dir",
        "api_key_file",
        "admin_api_key_file",
    }
)
"""Options of ``skiff serve`` whose values may be paths; those of other commands have the type ``Path``."""


def write_completion(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the completion script of ``parser`` and all its commands."""
    _declare_values(parser)
    return str(shtab.complete(parser, shell))


def _declare_values(parser: argparse.ArgumentParser) -> None:
    """Declare for shtab the values that each option accepts: files, or the choices of a field of ``Config``.

    The parser itself does not check the choices of a configuration field, because a variable may set it too.
    """
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _declare_values(command)
        elif action.type is Path or action.dest in _PATH_FIELDS:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif action.choices is None and isinstance(action.metavar, str) and action.metavar.startswith("{"):
            action.choices = field_choices(action.dest)
