"""The page docs/guide/flags.md, made from the fields of ``Config``, as ``skiff serve --help`` is.

python tests/support/flag_page.py > docs/guide/flags.md
"""

import types
import typing
from dataclasses import Field, fields
from typing import Any, Literal

from skiff_runtime.config import Config, flag
from skiff_runtime.config.arguments import env_var_name

HEAD = """\
# Flags of `skiff serve`

Each flag can also be given in the environment, under the name beside it; the command line wins. An unknown flag or
`SKIFF_` variable, or a value out of range, ends the start with one line that names it. The fields of `LLM(...)` are
the same, with underscores: `LLM("demo://", max_model_len=1024)`.

This page is made by `python tests/support/flag_page.py > docs/guide/flags.md`; a test compares the two.
"""


def render() -> str:
    """The whole page."""
    lines = [HEAD.rstrip()]
    group = None
    for each in fields(Config):
        if each.metadata["group"] != group:
            group = each.metadata["group"]
            lines += [
                "",
                f"## {group}",
                "",
                "| flag | variable | takes | default | what it does |",
                "|---|---|---|---|---|",
            ]
        lines.append(_row(each))
    return "\n".join(lines) + "\n"


def _row(each: "Field[Any]") -> str:
    default = each.default
    shown = "" if default is None or default == () else "off" if default is False else f"`{default}`"
    names = f"`{flag(each.name)}` | `{env_var_name(each.name)}`"
    return f"| {names} | {_takes(each.name)} | {shown} | {_text(each.metadata['help'])} |"


def _text(words: str) -> str:
    return words.replace("|", "/").replace("<", "&lt;")


def _takes(name: str) -> str:
    hint = typing.get_type_hints(Config)[name]
    if isinstance(hint, types.UnionType):
        hint = next(part for part in typing.get_args(hint) if part is not types.NoneType)
    if typing.get_origin(hint) is Literal:
        return ", ".join(f"`{choice}`" for choice in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return "text, repeatable"
    return {int: "whole number", float: "number", str: "text", bool: ""}[hint]


if __name__ == "__main__":
    print(render(), end="")
