"""What a child process is told at its start: a file in the service's private directory."""

from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Final

import msgspec

from skiff_runtime.config import Config
from skiff_runtime.models.config import ModelConfig, read_model_config

_FILE: Final = "launch.json"


class Role(StrEnum):
    """The kinds of child processes."""

    API = "api"
    TOKENIZER = "tokenizer"
    DETOKENIZER = "detokenizer"
    RANK = "rank"


@dataclass(frozen=True, slots=True)
class Launch:
    """The resolved configuration, the model's, and the 0700 directory of sockets."""

    config: Config
    model: ModelConfig
    run_dir: Path

    def write(self) -> None:
        """Leave this for the children to read; they read the model's own files themselves."""
        told = _LaunchFile(self.config, str(self.model.path), str(self.model.tokenizer_path))
        file = self.run_dir / _FILE
        file.touch(mode=0o600)  # it holds the API keys
        file.write_bytes(msgspec.json.encode(told))

    @staticmethod
    def read(run_dir: Path) -> "Launch":
        """What ``write`` left in ``run_dir``."""
        told = msgspec.json.decode((run_dir / _FILE).read_bytes(), type=_LaunchFile)
        model = read_model_config(Path(told.model_path), max_model_len=told.config.max_model_len)
        model = replace(model, tokenizer_path=Path(told.tokenizer_path))
        return Launch(config=told.config, model=model, run_dir=run_dir)


class _LaunchFile(msgspec.Struct):
    """The file's content."""

    config: Config
    model_path: str
    tokenizer_path: str
