"""The files of a LoRA adapter: a URI, as of a model, becomes a directory."""

from pathlib import Path
from typing import Final

from skiff_runtime import log
from skiff_runtime.config import Config
from skiff_runtime.config.adapters import parse_adapters
from skiff_runtime.errors import ConfigError, FetchError
from skiff_runtime.hub.fetch import choose_hub_cache
from skiff_runtime.hub.repository import ADAPTER_CONFIG
from skiff_runtime.processes.launch import StartAdapter
from skiff_runtime.sources.fetch import fetch_model, is_remote

_FILE: Final = "file://"
_SCHEME: Final = "://"


def locate_adapter(uri: str, download_dir: str | None) -> Path:
    """Return the directory of an adapter. One of a hub, an object store or a registry is downloaded if needed.

    Raises ``ConfigError`` for a URI that names none, and ``FetchError``.
    """
    if is_remote(uri):
        path = fetch_model(uri, None, choose_hub_cache(download_dir), adapter_only=True)
    elif _SCHEME in uri.removeprefix(_FILE):
        raise ConfigError(
            f"{uri}: unknown scheme; give a directory, file:///path, hf://org/name, s3://bucket/prefix, gs://bucket/prefix "
            "or oci://registry/repository:tag"
        )
    else:
        path = Path(uri.removeprefix(_FILE)).absolute()
    try:
        is_there = (path / ADAPTER_CONFIG).is_file()
    except OSError as error:
        raise ConfigError(f"{uri}: cannot look for {ADAPTER_CONFIG}: {error.strerror}") from None
    if not is_there:
        raise ConfigError(f"{uri}: no adapter found: there is no {ADAPTER_CONFIG} in {path}")
    return path


def locate_start_adapters(config: Config) -> tuple[StartAdapter, ...]:
    """Return the adapters of ``--lora`` that are there, with ids from 1 on; the others are logged and left out.

    One adapter that is gone must not keep the model and all other adapters from being served. Raises ``ConfigError`` for an
    adapter with the model's name.
    """
    found: list[StartAdapter] = []
    for each in parse_adapters(config.lora):
        if each.name == config.served_model_name:
            raise ConfigError(
                f"--lora {each.name}: this is the name of the model; give the adapter another one"
            )
        try:
            path = locate_adapter(each.uri, config.adapters_dir)
        except (ConfigError, FetchError) as error:
            log.error("adapter_left_out", adapter=each.name, uri=each.uri, reason=str(error))
        else:
            found.append(StartAdapter(len(found) + 1, each.name, each.uri, str(path)))
    return tuple(found)
