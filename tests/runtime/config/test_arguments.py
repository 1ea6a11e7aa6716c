"""Flags and environment variables: precedence, refused values, and former names."""

import argparse
from typing import Any

import pytest

from skiff_runtime import contract
from skiff_runtime.__main__ import main
from skiff_runtime.config import Config, field_names, flag
from skiff_runtime.config.arguments import Parser, add_config_arguments, build_config, env_var_name
from skiff_runtime.config.config import flags as spellings
from skiff_runtime.config.renamed_options import RENAMED_FIELDS
from skiff_runtime.contract import EXIT_USAGE
from skiff_runtime.errors import ConfigError
from skiff_runtime.fetch import command


def read(*words: str, **environment: str) -> Config:
    parser = Parser(prog="skiff serve")
    add_config_arguments(parser)
    return build_config(parser.parse_args(list(words)), environment)


def test_defaults_are_valid() -> None:
    assert read() == Config()


def test_flag_takes_precedence_over_its_variable() -> None:
    assert read(SKIFF_PAGE_SIZE="32").page_size == 32
    assert read("--page-size", "64", SKIFF_PAGE_SIZE="32").page_size == 64


@pytest.mark.parametrize("text,value", [("1", True), ("true", True), ("no", False), ("0", False)])
def test_switch_can_be_set_by_its_variable(text: str, value: bool) -> None:
    assert read(SKIFF_DISABLE_OVERLAP_SCHEDULE=text).disable_overlap_schedule is value


def test_flags_of_the_contract_exist() -> None:
    flags = {value for name, value in vars(contract).items() if name.startswith("FLAG_")}
    fetch = argparse.ArgumentParser()
    command.add_arguments(fetch)
    of_fetch = {spelling for action in fetch._actions for spelling in action.option_strings}
    assert flags <= of_fetch | {spelling for name in field_names() for spelling in spellings(name)}


def test_help_names_each_flag_and_variable(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser(prog="skiff serve")
    add_config_arguments(parser)
    text = parser.format_help()
    for name in field_names():
        assert flag(name) in text and env_var_name(name) in text


BAD: list[tuple[list[str], dict[str, str], str]] = [
    (["--page-size", "x"], {}, "--page-size must be a whole number, not 'x'"),
    (["--page-size", "0"], {}, "--page-size must be from 1 to 1024, not 0"),
    ([], {"SKIFF_PORT": "http"}, "SKIFF_PORT must be a whole number"),
    ([], {"SKIFF_PORT": "70000"}, "--port must be from 0 to 65535"),
    ([], {"SKIFF_DISABLE_OVERLAP_SCHEDULE": "maybe"}, "SKIFF_DISABLE_OVERLAP_SCHEDULE must be true or false"),
    (
        [],
        {"SKIFF_PAGE_SIZ": "1"},
        "unknown environment variable SKIFF_PAGE_SIZ; did you mean SKIFF_PAGE_SIZE?",
    ),
    (["--schedule-policy", "prefix"], {}, "--schedule-policy must be one of fcfs, lpm, not 'prefix'"),
    (["--no-disable-overlap"], {}, "--no-disable-overlap is now --no-disable-overlap-schedule"),
    (["--mem-fraction-static", "1.5"], {}, "--mem-fraction-static must be from 0.01 to 0.99"),
    (["--mem-fraction-static", "nan"], {}, "--mem-fraction-static must be from 0.01 to 0.99"),
    (["--no-such-flag", "1"], {}, "--no-such-flag"),
    (["--model", ""], {}, "--model must not be empty"),
    (["--page-si", "8"], {}, "--page-si"),
    (["--max-total-tokens", "8"], {}, "--max-total-tokens (8) must hold at least one page"),
    (["--max-total-tokens", "64", "--mem-fraction-static", "0.5"], {}, "both size the KV cache"),
    (["--tp", "0"], {}, "--tp must be from 1 to 64"),
    (["--max-total-tokens", "1", "--page-size", "1"], {}, "--max-total-tokens must be from 2"),
    ([], {"SKIFF_LLAMA_PORT": "tcp://10.0.0.1:80"}, "unknown environment variable SKIFF_LLAMA_PORT"),
]


@pytest.mark.parametrize("words,environment,message", BAD)
def test_invalid_option_is_named(words: list[str], environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(*words, **environment)
    assert message in str(caught.value)


@pytest.mark.parametrize("old", sorted(RENAMED_FIELDS.keys() - {"tp"}))
def test_former_name_is_refused_and_the_new_one_given(old: str) -> None:
    spelled, variable = "--" + old.replace("_", "-"), f"SKIFF_{old.upper()}"
    new = RENAMED_FIELDS[old]
    with pytest.raises(ConfigError, match=f"^{spelled} is now {flag(new)};"):
        read(spelled, "1")
    with pytest.raises(ConfigError, match=f"^{variable} is now {env_var_name(new)}$"):
        read(**{variable: "1"})


def test_tensor_parallel_size_has_two_spellings() -> None:
    assert read("--tp", "2") == read("--tensor-parallel-size", "2") == read(SKIFF_TP="2") == Config(tp_size=2)


def test_variables_of_the_test_tooling_are_ignored() -> None:
    assert read(SKIFF_TEST_SEED="1", SKIFF_CLUSTER_CACHE="/x") == Config()


def service_links(name: str) -> dict[str, str]:
    """Return the variables that Kubernetes sets in each container of a namespace for a Service called ``name``."""
    url = "tcp://10.96.7.1:8000"
    return {
        f"{name}_SERVICE_HOST": "10.96.7.1",
        f"{name}_SERVICE_PORT": "8000",
        f"{name}_SERVICE_PORT_HTTP": "8000",
        f"{name}_PORT": url,
        f"{name}_PORT_8000_TCP": url,
        f"{name}_PORT_8000_TCP_PROTO": "tcp",
        f"{name}_PORT_8000_TCP_PORT": "8000",
        f"{name}_PORT_8000_TCP_ADDR": "10.96.7.1",
    }


def test_service_links_of_the_namespace_are_ignored() -> None:
    assert read(**service_links("SKIFF"), **service_links("SKIFF_LLAMA")) == Config()
    assert read(**{**service_links("SKIFF"), "SKIFF_PORT": "8080"}).port == 8080


def test_running_limit_is_bounded_by_the_tokens_of_a_step() -> None:
    assert read("--max-num-batched-tokens", "16").running_limit == 16
    assert read("--max-running-requests", "8").running_limit == 8


def test_fixed_values_override_flags() -> None:
    options: dict[str, Any] = {"page_size": 4}
    assert build_config(argparse.Namespace(page_size="8"), {}, **options).page_size == 4


def test_renamed_benchmark_is_refused_with_its_new_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "gaps", "--streams", "4"]) == EXIT_USAGE
    assert "bench gaps is now bench prefill-interference" in capsys.readouterr().err
