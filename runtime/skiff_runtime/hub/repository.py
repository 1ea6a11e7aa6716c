"""The files of a repository, and the choice of those that serving needs."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from skiff_runtime.errors import FetchError

CONFIG: Final = "config.json"
GENERATION_CONFIG: Final = "generation_config.json"
INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
_DESCRIPTIONS: Final = (
    CONFIG,
    GENERATION_CONFIG,
    INDEX,
    "tokenizer*",  # tokenizer.json, tokenizer.model, tokenizer.model.v3, tokenizer.tiktoken, tokenizer_config.json
    "*.tiktoken",
    "tekken.json",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
)
_SHA256_DIGITS: Final = 64
_READ_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of the repository. ``digest`` is hex, and empty where it is not known: sha256 of the content for a
    file in large-file storage, git's blob sha1 for any other."""

    name: str
    size_bytes: int
    digest: str

    def is_intact(self, path: Path) -> bool:
        """Return whether ``path`` has the file's size and content."""
        if path.stat().st_size != self.size_bytes:
            return False
        running = hashlib.sha256(usedforsecurity=False)
        if len(self.digest) != _SHA256_DIGITS:
            # git names a blob by the sha1 of a short header and the content.
            running = hashlib.sha1(f"blob {self.size_bytes}\0".encode(), usedforsecurity=False)
        with path.open("rb", buffering=0) as stream:
            while chunk := stream.read(_READ_BYTES):
                running.update(chunk)
        return self.digest in ("", running.hexdigest())


@dataclass(frozen=True, slots=True)
class RepositoryListing:
    """The top-level files of a model at one commit."""

    commit: str
    files: Sequence[RemoteFile]

    def descriptions(self) -> list[RemoteFile]:
        """Return the configuration and tokenizer files; FetchError without a config.json."""
        found = [file for file in self.files if any(fnmatchcase(file.name, glob) for glob in _DESCRIPTIONS)]
        if all(file.name != CONFIG for file in found):
            raise FetchError(
                "the repository has no config.json at its top: it is not a model that Skiff serves"
            )
        return found

    def weights(self, snapshot: Path) -> list[RemoteFile]:
        """Return those that the index in ``snapshot`` names, else model.safetensors, else every top-level one.

        A repository may hold the same weights twice (consolidated.safetensors); only one set is wanted.
        """
        found = {file.name: file for file in self.files if file.name.endswith(".safetensors")}
        if any(file.name == INDEX for file in self.files):
            return _named_by((snapshot / INDEX).read_bytes(), found)
        if not found:
            raise FetchError(
                "the repository has no *.safetensors files; Skiff reads no other format of weights"
            )
        return [found[SINGLE]] if SINGLE in found else list(found.values())


def _named_by(index: bytes, found: dict[str, RemoteFile]) -> list[RemoteFile]:
    try:
        wanted = sorted(set(json.loads(index)["weight_map"].values()))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise FetchError(f"{INDEX} is malformed: {error!r}") from error
    missing = [name for name in wanted if name not in found]
    if missing:
        raise FetchError(f"{INDEX} names {missing[0]!r}, which the repository does not have at its top")
    return [found[name] for name in wanted]
