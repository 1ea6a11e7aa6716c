"""The files of a model's repository, and the selection of those that serving needs."""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from skiff_runtime.errors import ConfigError, FetchError
from skiff_runtime.gguf.header import SUFFIX
from skiff_runtime.gguf.selection import select_by_quant_type

CONFIG: Final = "config.json"
GENERATION_CONFIG: Final = "generation_config.json"
ADAPTER_CONFIG: Final = "adapter_config.json"
ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"
INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
MAX_FILES: Final = 10_000
"""Files of one listing."""
_CONFIG_PATTERNS: Final = (
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
    "modules.json",  # of sentence-transformers, as the next two
    "config_sentence_transformers.json",
    "*_Pooling/config.json",
)
POOLING_CONFIG: Final = re.compile(r"[0-9]{1,2}_Pooling/config\.json")
"""The only file of a folder that is downloaded."""
_SHA256_DIGITS: Final = 64
_READ_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of the repository.

    ``digest`` is the SHA-256 of the content for a file in large-file storage (LFS), else git's blob SHA-1, both in hex;
    "" if it is unknown.
    """

    name: str
    size_bytes: int
    digest: str

    @property
    def has_sha256(self) -> bool:
        """Return whether the digest is the SHA-256 of the content."""
        return len(self.digest) == _SHA256_DIGITS

    def is_intact(self, path: Path) -> bool:
        """Return whether ``path`` has the file's size and content."""
        if path.stat().st_size != self.size_bytes:
            return False
        running = hashlib.sha256(usedforsecurity=False)
        if not self.has_sha256:
            # The name of a git blob is the SHA-1 of a short header and the content.
            running = hashlib.sha1(f"blob {self.size_bytes}\0".encode(), usedforsecurity=False)
        with path.open("rb", buffering=0) as stream:
            while chunk := stream.read(_READ_BYTES):
                running.update(chunk)
        return self.digest in ("", running.hexdigest())


@dataclass(frozen=True, slots=True)
class RepositoryListing:
    """The files of a model at one commit: those at the top level, and ``POOLING_CONFIG``."""

    commit: str
    files: Sequence[RemoteFile]

    @property
    def is_gguf(self) -> bool:
        """True if the only weights are GGUF files, which contain configuration, tokenizer and template."""
        suffixes = {Path(file.name).suffix for file in self.files}
        return SUFFIX in suffixes and ".safetensors" not in suffixes

    @property
    def is_adapter(self) -> bool:
        """True for a LoRA adapter as peft writes it, without a model beside it."""
        return self._has(ADAPTER_CONFIG) and not self._has(CONFIG)

    def require_adapter(self, uri: str) -> None:
        """Raise ``ConfigError``, which names ``uri``, if the files are not those of an adapter."""
        if not self.is_adapter:
            why = f"has a {CONFIG}, as a model has" if self._has(CONFIG) else f"has no {ADAPTER_CONFIG}"
            raise ConfigError(f"{uri}: no adapter found: the top level of the source {why}")

    def config_files(self) -> list[RemoteFile]:
        """Return the configuration, tokenizer and template files, none of a GGUF model, and only one of an adapter.

        Raises ``FetchError`` without a config.json.
        """
        if self.is_adapter:
            return [file for file in self.files if file.name == ADAPTER_CONFIG]
        if self.is_gguf:
            return []
        found = [file for file in self.files if is_config_file(file.name)]
        if all(file.name != CONFIG for file in found):
            raise FetchError("the repository has no config.json at its top level: Skiff cannot serve it")
        return found

    def weight_files(self, snapshot: Path, quant_type: str = "") -> list[RemoteFile]:
        """Return the files that the index in ``snapshot`` names, else model.safetensors, else every *.safetensors.

        A repository may hold the same weights twice, as consolidated.safetensors too; one set is enough. Of a GGUF
        model it is the one file of ``quant_type``. Raises ``FetchError`` if there are none.
        """
        if self.is_adapter:
            return self._adapter_weights()
        if self.is_gguf:
            return [self._gguf_file(quant_type)]
        if quant_type:
            raise FetchError(
                f"the repository has no GGUF files alone, so {quant_type!r} chooses none; omit it"
            )
        found = {file.name: file for file in self.files if file.name.endswith(".safetensors")}
        if any(file.name == INDEX for file in self.files):
            return _files_in_index((snapshot / INDEX).read_bytes(), found)
        if not found:
            raise FetchError(
                "the repository has no *.safetensors and no *.gguf files, and Skiff reads no other weight format"
            )
        return [found[SINGLE]] if SINGLE in found else list(found.values())

    def _has(self, name: str) -> bool:
        return any(file.name == name for file in self.files)

    def _adapter_weights(self) -> list[RemoteFile]:
        found = [file for file in self.files if file.name == ADAPTER_WEIGHTS]
        if not found:
            raise FetchError(
                f"the adapter has no {ADAPTER_WEIGHTS}, and Skiff reads no other format: save it with safetensors"
            )
        return found

    def _gguf_file(self, quant_type: str) -> RemoteFile:
        names = [file.name for file in self.files if file.name.endswith(SUFFIX)]
        found = select_by_quant_type(names, quant_type)
        if len(found) != 1:
            chosen = (
                f"{quant_type!r} chooses {', '.join(found) or 'none'} of its" if quant_type else "it has the"
            )
            raise FetchError(
                f"{chosen} GGUF files {', '.join(sorted(names))}: choose one by its quantization, as in "
                "hf://org/name:Q4_K_M"
            )
        return next(file for file in self.files if file.name == found[0])


def is_config_file(name: str) -> bool:
    """Return whether serving may need this file beside the weights: configuration, tokenizer or template."""
    return any(fnmatchcase(name, glob) for glob in _CONFIG_PATTERNS)


def _files_in_index(index: bytes, found: dict[str, RemoteFile]) -> list[RemoteFile]:
    try:
        names = sorted(set(json.loads(index)["weight_map"].values()))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise FetchError(f"{INDEX} is malformed: {error!r}") from error
    missing = [name for name in names if name not in found]
    if missing:
        raise FetchError(f"{INDEX} names {missing[0]!r}, which the repository does not have at its top level")
    return [found[name] for name in names]
