"""References to models of a hub: ``hf://`` URIs and revisions."""

import re
from dataclasses import dataclass
from typing import Final

from skiff_runtime.errors import ConfigError

SCHEME: Final = "hf://"
DEFAULT_REVISION: Final = "main"
_PART: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9])?")
_REVISION: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._/+@-]{0,254}")
_QUANT_TYPE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class HubReference:
    """A model at a revision: a branch, a tag or a commit. ``quant_type`` chooses one of several GGUF files."""

    organisation: str
    name: str
    revision: str = DEFAULT_REVISION
    quant_type: str = ""

    @property
    def model_id(self) -> str:
        """``org/name``, as the hub's API spells it."""
        return f"{self.organisation}/{self.name}"

    def __str__(self) -> str:
        quant_type = f":{self.quant_type}" if self.quant_type else ""
        return f"{SCHEME}{self.model_id}{quant_type}@{self.revision}"


def parse_reference(uri: str, revision: str | None = None) -> HubReference:
    """Parse ``hf://org/name`` or ``hf://org/name:quant_type`` and a revision (default ``main``).

    Raises ``ConfigError`` if either is malformed.
    """
    model, separator, quant_type = uri.removeprefix(SCHEME).partition(":")
    parts = model.split("/")
    if not uri.startswith(SCHEME) or len(parts) != 2 or not all(map(_is_part, parts)):
        raise ConfigError(
            f"{uri!r} is not a hub model; write hf://org/name, as in hf://meta-llama/Llama-3.1-8B-Instruct"
        )
    if separator and not _QUANT_TYPE.fullmatch(quant_type):
        raise ConfigError(
            f"{quant_type!r} in {uri!r} is not the quantization of a GGUF file; write one as in hf://org/name:Q4_K_M"
        )
    chosen = DEFAULT_REVISION if revision is None else revision
    if not _REVISION.fullmatch(chosen) or ".." in chosen:
        raise ConfigError(f"--revision {chosen!r} is not the name of a branch, tag or commit")
    return HubReference(parts[0], parts[1], chosen, quant_type)


def is_commit(text: str) -> bool:
    """Return whether ``text`` is a full commit hash, which always names the same files."""
    return _COMMIT.fullmatch(text) is not None


def _is_part(part: str) -> bool:
    # "--" separates organisation and name in the cache's directory names; the hub allows it in neither.
    return _PART.fullmatch(part) is not None and "--" not in part and ".." not in part
