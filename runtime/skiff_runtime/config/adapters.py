"""LoRA adapters by name: the values of ``--lora``, and the rules for names."""

from collections.abc import Container, Sequence
from typing import Final, NamedTuple

from skiff_runtime.errors import ConfigError, InvalidRequest

MAX_ADAPTERS: Final = 4096
"""Most adapters that a service has at a time."""
MAX_NAME_CHARACTERS: Final = 256


class NamedAdapter(NamedTuple):
    """An adapter's name in the API, and the URI of its files."""

    name: str
    uri: str


def find_name_fault(name: str) -> str | None:
    """Return why ``name`` cannot name an adapter, or None if it can.

    Metrics join names by commas, so a name contains none.
    """
    if not name:
        return "it is empty"
    if len(name) > MAX_NAME_CHARACTERS:
        return f"it has {len(name)} characters; at most {MAX_NAME_CHARACTERS} are allowed"
    if "," in name or not name.isprintable() or name != name.strip():
        return "it must consist of printable characters other than commas, without blanks at its ends"
    return None


def check_new_adapter(name: str, *, model: str, loaded: Container[str], count: int, replaces: bool) -> None:
    """Check that an adapter called ``name`` can be loaded beside the ``count`` adapters that there are.

    ``loaded``: the names that are taken; with ``replaces``, the new adapter may take one of them over.

    Raises:
        InvalidRequest: It cannot; ``param`` is "lora_name" where another name would help.
    """
    if (fault := find_name_fault(name)) is not None:
        raise InvalidRequest(f"the name cannot be used: {fault}", param="lora_name")
    if name == model:
        raise InvalidRequest(f"{name!r} is the name of the served model", param="lora_name")
    if name in loaded and not replaces:
        raise InvalidRequest(
            f"the adapter {name!r} is loaded already; set load_inplace to true to replace it",
            param="lora_name",
        )
    if count >= MAX_ADAPTERS:
        raise InvalidRequest(f"{MAX_ADAPTERS} adapters are loaded; unload some first")


def parse_adapters(values: Sequence[str]) -> tuple[NamedAdapter, ...]:
    """Parse the values of ``--lora``, each NAME=URI.

    Raises:
        ConfigError: A value has no URI or an unusable name, or a name occurs twice.
    """
    if len(values) > MAX_ADAPTERS:
        raise ConfigError(f"--lora occurs {len(values)} times; at most {MAX_ADAPTERS} adapters can be loaded")
    adapters: dict[str, NamedAdapter] = {}
    for value in values:
        name, _, uri = value.partition("=")
        if not uri:
            raise ConfigError(f"--lora must be NAME=URI, such as sql=hf://org/name, not {value!r}")
        if (fault := find_name_fault(name)) is not None:
            raise ConfigError(f"--lora {value!r}: the name cannot be used: {fault}")
        if name in adapters:
            raise ConfigError(f"--lora names the adapter {name!r} twice; give each its own name")
        adapters[name] = NamedAdapter(name, uri)
    return tuple(adapters.values())
