"""The values of ``--lora``, and the options beside it."""

import pytest

from skiff_runtime.config import Config
from skiff_runtime.config.adapters import MAX_ADAPTERS, NamedAdapter, parse_adapters
from skiff_runtime.errors import ConfigError


def test_value_is_a_name_and_a_uri() -> None:
    assert parse_adapters(["sql=hf://org/name", "chat=/adapters/a=b"]) == (
        NamedAdapter("sql", "hf://org/name"),
        NamedAdapter("chat", "/adapters/a=b"),
    )


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        (["sql"], "NAME=URI"),
        (["sql="], "NAME=URI"),
        (["=/adapters/a"], "it is empty"),
        (["a,b=/adapters/a"], "commas"),
        ([" a=/adapters/a"], "blanks"),
        (["a\nb=/adapters/a"], "printable"),
        ([f"{'n' * 257}=/adapters/a"], "257 characters"),
        (["a=/adapters/a", "a=/adapters/b"], "'a' twice"),
        ([f"a{i}=/adapters/a" for i in range(MAX_ADAPTERS + 1)], "at most"),
    ],
)
def test_unusable_value_is_named(values: list[str], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        Config(lora=tuple(values))


def test_host_memory_holds_at_least_the_adapters_of_gpu_memory() -> None:
    with pytest.raises(ConfigError, match="--max-cpu-loras"):
        Config(max_loras=8, max_cpu_loras=7)
    assert Config(max_loras=8, max_cpu_loras=8).max_cpu_loras == 8
