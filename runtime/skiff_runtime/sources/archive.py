"""Extraction of the tar layers of an artifact: regular files that serving needs, by names that stay in the directory."""

import os
import shutil
import tarfile
import zlib
from pathlib import Path, PurePosixPath
from typing import IO, Final

from skiff_runtime.errors import FetchError
from skiff_runtime.hub.model_cache import SPARE_BYTES
from skiff_runtime.hub.repository import is_config_file
from skiff_runtime.sources.model_source import MAX_FILES

_COPY_BYTES: Final = 4 << 20
_NAME_CHARACTERS: Final = 255
_FOLDERS: Final = 4


def safe_name(name: str, what: str) -> str:
    """Return a relative path without ``.`` parts. Raises ``FetchError`` for one that would leave the directory."""
    path = PurePosixPath(name)
    if (
        path.is_absolute()
        or not path.parts
        or ".." in path.parts
        or "\\" in name
        or not name.isprintable()
        or len(name) > _NAME_CHARACTERS
        or len(path.parts) > _FOLDERS
    ):
        raise FetchError(
            f"{what} contains the file name {name!r}, which is refused: it may not leave its folder"
        )
    return str(path)


def is_wanted(name: str) -> bool:
    """Return whether a file of this path may be served: safetensors, configuration, tokenizer or template."""
    last = PurePosixPath(name).name
    return last.endswith(".safetensors") or is_config_file(last)


def extract(archive: Path, target: Path, *, what: str) -> dict[str, int]:
    """Extract the files that serving may need, and return their names with their sizes in bytes.

    Raises ``FetchError`` for an archive that is malformed, too large for the volume, or has unsafe names, and for wanted
    files that are links or devices.
    """
    sizes: dict[str, int] = {}
    try:
        with tarfile.open(archive, "r:*") as tar:
            for count, member in enumerate(tar, start=1):
                if count > MAX_FILES:
                    raise FetchError(f"{what} contains more than {MAX_FILES} files")
                if member.isdir():
                    continue
                name = safe_name(member.name, what)
                if not is_wanted(name):
                    continue
                content = tar.extractfile(member) if member.isreg() else None
                if content is None:
                    raise FetchError(
                        f"{what} contains {name} as a link or a device; pack the files themselves (tar -h)"
                    )
                if member.size + SPARE_BYTES > shutil.disk_usage(target).free:
                    raise FetchError(
                        f"not enough space in {target} for {name} of {what}; use a larger volume"
                    )
                _write(content, target / name, member.size)
                sizes[name] = member.size
    except (tarfile.TarError, EOFError, zlib.error, ValueError) as error:
        raise FetchError(f"{what} is not a readable tar archive ({error}); push it again") from error
    return sizes


def _write(content: IO[bytes], path: Path, size_bytes: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.extracting")
    with temporary.open("wb") as stream:
        shutil.copyfileobj(content, stream, _COPY_BYTES)
        if stream.tell() != size_bytes:
            raise EOFError(f"{path.name} ends early")
        stream.flush()
        os.fdatasync(stream.fileno())
    temporary.replace(path)
