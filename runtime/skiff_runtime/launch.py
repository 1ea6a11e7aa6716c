"""What a child process is told at its start: a file in the service's private directory."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

import msgspec

from skiff_runtime.config import Config
from skiff_runtime.models.config import ModelConfig

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
        """Leave this for the children to read."""
        (self.run_dir / _FILE).write_bytes(msgspec.json.encode(self, enc_hook=str))

    @staticmethod
    def read(run_dir: Path) -> "Launch":
        """What ``write`` left in ``run_dir``."""
        data = (run_dir / _FILE).read_bytes()
        return msgspec.json.decode(data, type=Launch, dec_hook=lambda kind, value: kind(value))
