"""The launch file, from which child processes read the resolved configuration at their start."""

from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Final

import msgspec

from skiff_runtime.config import Config
from skiff_runtime.models.config import ModelConfig, read_model_config

_FILE: Final = "launch.json"


class StartAdapter(msgspec.Struct, frozen=True):
    """A LoRA adapter of ``--lora``: ``path`` is the directory that its URI was resolved to."""

    adapter_id: int
    name: str
    uri: str
    path: str


class Role(StrEnum):
    """The kinds of child processes."""

    API = "api"
    TOKENIZER = "tokenizer"
    DETOKENIZER = "detokenizer"
    RANK = "rank"


@dataclass(frozen=True, slots=True)
class Launch:
    """The resolved configuration, the model's configuration, and the private directory (0700) of the sockets.

    ``adapters``: those of ``--lora``, whose ids are 1, 2, ... in their order.
    """

    config: Config
    model: ModelConfig
    run_dir: Path
    adapters: tuple[StartAdapter, ...] = ()

    def write(self) -> None:
        """Write the launch file for the children, which read the model's own files themselves."""
        content = _LaunchFile(
            self.config, str(self.model.path), str(self.model.tokenizer_path), self.adapters
        )
        file = self.run_dir / _FILE
        file.touch(mode=0o600)  # it holds the API keys
        file.write_bytes(msgspec.json.encode(content))

    @staticmethod
    def read(run_dir: Path) -> "Launch":
        """Read the launch file in ``run_dir``."""
        content = msgspec.json.decode((run_dir / _FILE).read_bytes(), type=_LaunchFile)
        config = content.config
        model = read_model_config(
            Path(content.model_path), max_model_len=config.max_model_len, rope_scaling=config.rope_scaling
        )
        model = replace(model, tokenizer_path=Path(content.tokenizer_path))
        return Launch(config=config, model=model, run_dir=run_dir, adapters=content.adapters)


class _LaunchFile(msgspec.Struct):
    """The content of the launch file."""

    config: Config
    model_path: str
    tokenizer_path: str
    adapters: tuple[StartAdapter, ...]
