"""The interface of a source of models: a listing, beside the byte ranges of its files."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from skiff_runtime.errors import FetchError
from skiff_runtime.transfer.range_source import RangeSource, RemoteObject

MAX_FILES: Final = 10_000
MAX_MODEL_BYTES: Final = 8 << 40


@dataclass(frozen=True, slots=True)
class SourceListing:
    """The files of a model. ``version`` changes with any of them. ``archives``: tar files that contain more files."""

    version: str
    files: Sequence[RemoteObject]
    archives: Sequence[RemoteObject] = ()


class ModelSource(RangeSource, Protocol):
    """A client of one source for one model. Its methods raise ``FetchError``, and ``TransientSourceError`` if a retry may help."""

    def list_objects(self) -> SourceListing:
        """Return the files at the source."""
        ...


def check_limits(sizes: Sequence[int], what: str) -> None:
    """Raise ``FetchError`` if there are more files or bytes than a model has."""
    if len(sizes) > MAX_FILES or sum(sizes) > MAX_MODEL_BYTES or min(sizes, default=0) < 0:
        raise FetchError(
            f"{what} has {len(sizes)} files of {sum(sizes)} bytes; at most {MAX_FILES} files of {MAX_MODEL_BYTES} bytes "
            "are downloaded: name the model's own folder"
        )
