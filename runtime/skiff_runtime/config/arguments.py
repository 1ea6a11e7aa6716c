"""Command-line flags and environment variables, both derived from the fields of ``Config``.

A flag takes precedence over its environment variable, which takes precedence over the default. An unknown or
malformed option raises a ConfigError that names it.
"""

import argparse
import difflib
import os
import types
import typing
from collections.abc import Mapping
from dataclasses import Field, fields
from typing import Any, Final, Literal

from skiff_runtime.config.config import Config, flag, flags
from skiff_runtime.config.renamed_options import RENAMED_FIELDS
from skiff_runtime.contract import ENV_PREFIX
from skiff_runtime.errors import ConfigError

FOREIGN_PREFIXES: Final = ("SKIFF_CLUSTER_", "SKIFF_OPERATOR_", "SKIFF_TEST_")
"""Prefixes of the variables of the operator and of the test tooling, which a server ignores."""

_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"0", "false", "no", "off"})
_HINTS: Final = typing.get_type_hints(Config)


class Parser(argparse.ArgumentParser):
    """An argument parser that raises ConfigError instead of exiting, and accepts no abbreviated flags."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "allow_abbrev": False})

    def error(self, message: str) -> typing.NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def add_config_arguments(parser: argparse.ArgumentParser, *, skip: tuple[str, ...] = ()) -> None:
    """Add a flag for each field of Config, in help groups, except for the fields that ``skip`` names."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    for each in fields(Config):
        if each.name in skip:
            continue
        title = each.metadata["group"]
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        _add_argument(groups[title], each)
    add_renamed_flags(parser, _renamed_flags(skip))


def add_renamed_flags(parser: argparse.ArgumentParser, renamed: Mapping[str, str]) -> None:
    """Refuse former flags with a ConfigError that names the new one. ``renamed`` maps former to new spellings."""
    for old, new in renamed.items():
        parser.add_argument(old, nargs="?", action=_RenamedFlag, const=new, help=argparse.SUPPRESS)


class _RenamedFlag(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> typing.NoReturn:
        raise ConfigError(f"{option_string} is now {self.const}; see {parser.prog} --help")


def _add_argument(group: argparse._ArgumentGroup, each: "Field[Any]") -> None:
    text = each.metadata["help"].replace("%", "%%")
    if each.default not in (None, ()) and not isinstance(each.default, bool):
        text += f" (default: {each.default})" if "(default" not in text else ""
    text += f" [{env_var_name(each.name)}]"
    kind, choices = _kind(each.name)
    if kind is bool:
        group.add_argument(
            *flags(each.name), dest=each.name, action=argparse.BooleanOptionalAction, default=None, help=text
        )
        return
    if kind is tuple:
        group.add_argument(
            *flags(each.name), dest=each.name, default=None, action="append", metavar="STR", help=text
        )
        return
    metavar = "{" + ",".join(choices) + "}" if choices else kind.__name__.upper()
    group.add_argument(*flags(each.name), dest=each.name, default=None, metavar=metavar, help=text)


def _renamed_flags(skip: tuple[str, ...]) -> dict[str, str]:
    """Return the former flags of the fields that a parser has, with their new spellings."""
    found: dict[str, str] = {}
    for old, new in RENAMED_FIELDS.items():
        spelled = "--" + old.replace("_", "-")
        if new in skip or spelled in flags(new):
            continue
        found[spelled] = flag(new)
        if _HINTS[new] is bool:
            found["--no-" + spelled.removeprefix("--")] = "--no-" + flag(new).removeprefix("--")
    return found


def build_config(
    arguments: argparse.Namespace, environment: Mapping[str, str] = os.environ, **fixed: Any
) -> Config:
    """Build the validated configuration from a command line and an environment; ``fixed`` overrides both."""
    environment = _drop_service_links(environment)
    _refuse_unknown(environment)
    values: dict[str, Any] = {}
    for each in fields(Config):
        given = getattr(arguments, each.name, None)
        variable = env_var_name(each.name)
        if isinstance(given, list):
            values[each.name] = tuple(given)
        elif given is not None:
            values[each.name] = given if isinstance(given, bool) else parse(each.name, given, flag(each.name))
        elif variable in environment:
            values[each.name] = parse(each.name, environment[variable], variable)
    if {"max_total_tokens", "mem_fraction_static"} <= values.keys():
        raise ConfigError(
            "--max-total-tokens and --mem-fraction-static both size the KV cache; give only one"
        )
    return Config(**{**values, **fixed})


def env_var_name(name: str) -> str:
    """Return the environment variable that sets a field: ``max_model_len`` -> ``SKIFF_MAX_MODEL_LEN``."""
    return ENV_PREFIX + flag(name).removeprefix("--").replace("-", "_").upper()


def parse(name: str, text: str, source: str) -> Any:
    """Parse the value of one field. ``source`` is the flag or variable that an error names."""
    kind, choices = _kind(name)
    if choices:
        if text not in choices:
            raise ConfigError(f"{source} must be one of {', '.join(choices)}, not {text!r}")
        return text
    if kind is bool:
        if text.lower() not in _TRUE | _FALSE:
            raise ConfigError(f"{source} must be true or false, not {text!r}")
        return text.lower() in _TRUE
    if kind is tuple:
        parts = tuple(part for each in text.split(",") if (part := each.strip()))
        if not parts:
            raise ConfigError(f"{source} is empty; unset it, or give values separated by commas")
        return parts
    try:
        return kind(text)
    except ValueError:
        wanted = "a whole number" if kind is int else "a number"
        raise ConfigError(f"{source} must be {wanted}, not {text!r}") from None


def field_choices(name: str) -> tuple[str, ...]:
    """Return the values that a field of ``Config`` accepts; empty unless they are listed."""
    return _kind(name)[1]


def _kind(name: str) -> tuple[type, tuple[str, ...]]:
    """Return a field's scalar type (tuple for a repeatable one), and its choices if it is a Literal."""
    hint = _HINTS[name]
    if isinstance(hint, types.UnionType):
        hint = next(part for part in typing.get_args(hint) if part is not types.NoneType)
    if typing.get_origin(hint) is Literal:
        return str, typing.get_args(hint)
    return typing.get_origin(hint) or hint, ()


def _drop_service_links(environment: Mapping[str, str]) -> dict[str, str]:
    """Return ``environment`` without the service links that Kubernetes adds for each Service of the namespace.

    A Service named ``skiff-llama`` adds ``SKIFF_LLAMA_SERVICE_HOST`` and a dozen others. One named ``skiff`` even
    adds ``SKIFF_PORT``, but its value is a URL, whereas that of ``--port`` is a number.
    """
    host = "_SERVICE_HOST"
    services = [name.removesuffix(host) for name in environment if name.endswith(host)]
    prefixes = tuple(f"{service}{part}" for service in services for part in ("_SERVICE_", "_PORT_"))
    addresses = [f"{service}_PORT" for service in services]
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith(prefixes) and not (name in addresses and "://" in value)
    }


def _refuse_unknown(environment: Mapping[str, str]) -> None:
    known = [env_var_name(each.name) for each in fields(Config)]
    renamed = {ENV_PREFIX + old.upper(): env_var_name(new) for old, new in RENAMED_FIELDS.items()}
    for variable in sorted(environment):
        if not variable.startswith(ENV_PREFIX) or variable in known:
            continue
        if variable.startswith(FOREIGN_PREFIXES):
            continue
        if variable in renamed:
            raise ConfigError(f"{variable} is now {renamed[variable]}")
        near = difflib.get_close_matches(variable, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"unknown environment variable {variable}{hint}")
