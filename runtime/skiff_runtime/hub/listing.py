"""What the hub says that a model consists of, and which of it serving needs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final

from skiff_runtime.errors import FetchError
from skiff_runtime.hub.reference import HubReference, is_commit

CONFIG: Final = "config.json"
GENERATION_CONFIG: Final = "generation_config.json"
INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
MAX_FILES: Final = 10_000
_DESCRIPTIONS: Final = (
    CONFIG,
    GENERATION_CONFIG,
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    INDEX,
)
_WEIGHTS: Final = "*.safetensors"


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of the repository. ``digest`` is hex: sha256 of the content for a file in large-file
    storage, else git's blob sha1; ``algorithm`` says which."""

    name: str
    size_bytes: int
    algorithm: str
    digest: str

    @property
    def partial_name(self) -> str:
        """Its name while it is downloaded: with the checksum, so it is only continued with the same content."""
        return f"{self.name}.{self.digest[:16]}"


@dataclass(frozen=True, slots=True)
class Listing:
    """The top-level files of a model at one commit, in order of name."""

    commit: str
    files: tuple[RemoteFile, ...]

    def descriptions(self) -> list[RemoteFile]:
        """Configuration and tokenizer files; FetchError without a config.json."""
        found = [file for file in self.files if any(fnmatchcase(file.name, glob) for glob in _DESCRIPTIONS)]
        if all(file.name != CONFIG for file in found):
            raise FetchError(
                "the repository has no config.json at its top: it is not a model that Skiff serves"
            )
        return found

    def weights(self, index: bytes | None) -> list[RemoteFile]:
        """Weight files: those that ``index`` names, else model.safetensors, else every top-level one.

        A repository may hold the same weights twice (consolidated.safetensors); only one set is wanted.
        """
        found = [file for file in self.files if fnmatchcase(file.name, _WEIGHTS)]
        if index is not None:
            return _named_by(index, found)
        single = [file for file in found if file.name == SINGLE]
        if not found:
            raise FetchError(
                "the repository has no *.safetensors files; Skiff reads no other format of weights"
            )
        return single or found


def parse_listing(reference: HubReference, body: bytes) -> Listing:
    """Read the hub's answer to ``/api/models/ID/revision/REVISION?blobs=true``; FetchError if it is none."""
    try:
        data = json.loads(body)
        commit, siblings = data["sha"], data["siblings"]
        files = [_file(each) for each in siblings if "/" not in each["rfilename"]]
    except (ValueError, TypeError, KeyError) as error:
        raise FetchError(f"the hub's description of {reference} is malformed: {error!r}") from error
    if not is_commit(commit) or len(siblings) > MAX_FILES:
        raise FetchError(
            f"the hub's description of {reference} names no commit, or more than {MAX_FILES} files"
        )
    return Listing(commit, tuple(sorted(files, key=lambda file: file.name)))


def _file(entry: Mapping[str, Any]) -> RemoteFile:
    name = entry["rfilename"]
    if name in ("", ".", ".."):
        raise ValueError(f"file name {name!r}")
    stored = entry.get("lfs")
    if stored:
        return RemoteFile(name, int(stored["size"]), "sha256", _hex(stored["sha256"], 64))
    return RemoteFile(name, int(entry["size"]), "git-sha1", _hex(entry["blobId"], 40))


def _hex(text: str, length: int) -> str:
    if len(text) != length or any(c not in "0123456789abcdef" for c in text):
        raise ValueError(f"checksum {text!r}")
    return text


def _named_by(index: bytes, found: Sequence[RemoteFile]) -> list[RemoteFile]:
    try:
        wanted = sorted(set(json.loads(index)["weight_map"].values()))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise FetchError(f"{INDEX} is malformed: {error!r}") from error
    by_name = {file.name: file for file in found}
    missing = [name for name in wanted if name not in by_name]
    if missing:
        raise FetchError(f"{INDEX} names {missing[0]!r}, which the repository does not have at its top")
    return [by_name[name] for name in wanted]
